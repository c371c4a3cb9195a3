"""JSON of the generate extension: inputs and outputs by name, as scalars or flat arrays.

Specification: Triton's ``docs/protocol/extension_generate.md``, and ``GenerateRequestClass`` in its
``http_server.cc``.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.protocols.oip import parameters as oip_parameters
from modelport.gateway.types import InferRequest, InferResponse, Parameter, Tensor, TensorSpec
from modelport.gateway.wire import incremental_json, json_tensors, json_text, json_writer
from modelport.gateway.wire.raw_tensors import Buffer

_ID, _PARAMETERS = "id", "parameters"


def decode(body: Buffer, served: ServedVersion, model_version: int) -> InferRequest:
    """Decode a request: members that name an input are tensors, all others parameters.

    Raises:
        InvalidArgument: A member is invalid; the message names it.
    """
    document = json_text.loads(body) if len(body) else {}
    try:
        if type(document) is not dict:
            raise InvalidArgument("the request must be a JSON object")
        _check_unique(bytes(body), document)
        return _request(document, served, model_version)
    finally:
        json_text.discard(document, len(body))


def _request(document: dict[str, Any], served: ServedVersion, model_version: int) -> InferRequest:
    batch = (-1,) if served.signature.max_batch_size else ()
    specs = {spec.name: spec for spec in served.signature.inputs}
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, Parameter] = {}

    request_id = document.pop(_ID, "") if _ID not in specs else ""
    if type(request_id) is not str:
        raise InvalidArgument("Unable to parse 'id': it must be a string")
    nested = document.pop(_PARAMETERS, {})
    if _PARAMETERS in specs:
        raise InvalidArgument(
            f"Keyword '{_PARAMETERS}' for nested schema also given as input tensor name"
        )
    if type(nested) is not dict:
        raise InvalidArgument(f"Expected JSON object for keyword: '{_PARAMETERS}'")
    for members in (document, nested):
        for key, value in members.items():
            if key in tensors:
                raise InvalidArgument(f"input '{key}' already exists in request")
            if key in specs:
                tensors[key] = _tensor(specs[key], batch, value)
            else:
                _check_parameter(key, value, members is nested)
                parameters[key] = value
    return InferRequest(
        served.name, list(tensors.values()), (), model_version, request_id, parameters
    )


def _check_parameter(key: str, value: Any, is_nested: bool) -> None:
    try:
        oip_parameters.check(key, value)
    except InvalidArgument as error:
        if not is_nested:
            raise
        raise InvalidArgument(f"Converting keyword: '{_PARAMETERS}': {error}") from error


def _check_unique(text: bytes, document: dict[str, Any]) -> None:
    """Raise if ``text``, the source of ``document``, has a duplicate key.

    The check is only needed if ``text`` has more colons than keys: in strings, or after duplicates.
    """
    nested = document.get(_PARAMETERS)
    keys = len(document) + (len(nested) if type(nested) is dict else 0)
    if text.count(b":") <= keys:
        return
    if len(text) <= incremental_json.LONG_BYTES:
        json.loads(text, object_pairs_hook=_unique)
    elif json_text.count_keys(text) > keys:
        raise InvalidArgument("an input or a parameter already exists in request")


def _unique(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InvalidArgument(f"input '{key}' already exists in request")
        seen.add(key)


def _tensor(spec: TensorSpec, batch: tuple[int, ...], value: Any) -> Tensor:
    values = value if json_text.is_array(value) else [value]
    shape = _shape(spec, (*batch, *spec.wire_dims), len(values))
    return Tensor(
        spec.name, spec.datatype, json_tensors.decode(spec.name, spec.datatype, shape, values)
    )


def _shape(spec: TensorSpec, dims: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Resolve ``dims`` for ``count`` elements: the innermost dynamic one gets all, the others 1."""
    for dim in dims:
        if dim > 0 and count % dim == 0:
            count //= dim
        elif dim != -1:
            count = -1
            break
    shape = list(dims)
    for index in reversed(range(len(dims))):
        if dims[index] == -1:
            shape[index], count = count, 1
    if count != 1 or -1 in shape:
        raise InvalidArgument(
            f"The schema can not convert input '{spec.name}' to tensor with proper shape: it is "
            f"{list(dims)}"
        )
    return tuple(shape)


def encode(response: InferResponse) -> Buffer:
    """Encode a response as an object of outputs and parameters, in alphabetical order.

    Raises:
        InvalidArgument: JSON cannot represent an output.
    """
    document: dict[str, Any] = {
        "model_name": response.model_name,
        "model_version": str(response.model_version),
    }
    if response.id:
        document[_ID] = response.id
    document.update(response.parameters)
    for tensor in response.outputs:
        data = json_tensors.encode(tensor)
        if data.dtype.kind == "f":
            data = data.astype(np.float64)  # Triton writes all digits
        document[tensor.name] = data.reshape(()) if data.size == 1 else data
    return json_writer.dumps(dict(sorted(document.items())))


def event(response: InferResponse) -> Buffer:
    """Encode a response as a server-sent event."""
    return json_writer.join((b"data: ", encode(response), b"\n\n"))
