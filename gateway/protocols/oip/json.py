"""OIP over HTTP, bytes ↔ types: the JSON request and reply with the binary tensor extension.

Wire contract: triton-inference-server/server ``docs/protocol``, ``http_server.cc``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gateway.errors import InvalidArgument
from gateway.protocols.oip import parameters as oip_parameters
from gateway.types import (
    Datatype,
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
    TensorSpec,
)
from gateway.wire import json_data, json_text, raw
from gateway.wire.raw import Buffer

_UNSET = object()


@dataclass(slots=True)
class ReplyForm:
    """Which outputs the client wants as bytes behind the JSON."""

    binary: bool = False
    by_output: dict[str, bool] = field(default_factory=dict)


def decode(
    body: Buffer, header_length: int, model_name: str, model_version: int
) -> tuple[InferRequest, ReplyForm]:
    """The request whose JSON part is the first ``header_length`` bytes of ``body``.

    Raises:
        InvalidArgument: naming the member or input that is wrong.
        Unsupported: shared memory is asked for.
    """
    part = body if header_length == len(body) else memoryview(body)[:header_length]
    return decode_document(json_text.loads(part), body, header_length, model_name, model_version)


def decode_document(
    document: Any, body: Buffer, header_length: int, model_name: str, model_version: int
) -> tuple[InferRequest, ReplyForm]:
    """``decode`` where the JSON part is parsed already."""
    view = memoryview(body)
    if type(document) is not dict:
        raise InvalidArgument("the request must be a JSON object")
    parameters = _parameters(document)
    request_id = document.get("id", "")
    if type(request_id) is not str:
        raise InvalidArgument("Unable to parse 'id': it must be a string")
    inputs = document.get("inputs")
    if type(inputs) is not list:
        raise InvalidArgument("Unable to parse 'inputs': it must be an array")
    tensors, offset = [], header_length
    for item in inputs:
        tensor, offset = _input(item, view, offset)
        tensors.append(tensor)
    if offset != len(body):
        raise InvalidArgument(
            f"unexpected additional input data for model '{model_name}': {len(body) - offset} bytes"
        )
    form = ReplyForm(bool(parameters.get("binary_data_output", False)))
    request = InferRequest(
        model_name, tensors, (), model_version, request_id, parameters=parameters
    )
    if "outputs" in document:
        _outputs(document["outputs"], request, form)
    return request, form


def decode_raw(
    body: Buffer, spec: TensorSpec, shape: tuple[int, ...], model_name: str, model_version: int
) -> tuple[InferRequest, ReplyForm]:
    """A request that is one input's bytes and nothing else; it is answered in bytes."""
    if spec.datatype is Datatype.BYTES:  # without its length field
        data = raw.object_array([bytes(body)], shape)
    else:
        data = raw.decode(spec.name, spec.datatype, shape, body)
    tensor = Tensor(spec.name, spec.datatype, data)
    return InferRequest(model_name, [tensor], model_version=model_version), ReplyForm(binary=True)


def _parameters(owner: dict[str, Any]) -> dict[str, Parameter]:
    parameters = owner.get("parameters")
    if parameters is None:
        return {}
    if type(parameters) is not dict:
        raise InvalidArgument("Unable to parse 'parameters': it must be an object")
    for key, value in parameters.items():
        oip_parameters.check(key, value)
    return parameters


def _input(item: Any, body: memoryview, offset: int) -> tuple[Tensor, int]:
    """One input and the offset behind its bytes."""
    if type(item) is not dict:
        raise InvalidArgument("Unable to parse 'inputs': each must be an object")
    name = item.get("name")
    if type(name) is not str:
        raise InvalidArgument("Unable to parse 'name' of an input: it must be a string")
    datatype = raw.parse_datatype(name, item.get("datatype"))
    shape = item.get("shape")
    if type(shape) is not list:
        raise InvalidArgument(f"Unable to parse 'shape' of input '{name}': it must be an array")
    shape = raw.parse_shape(name, shape)
    data = item.get("data", _UNSET)
    size = None
    if "parameters" in item:
        parameters = _parameters(item)
        oip_parameters.refuse_shared_memory(parameters)
        size = parameters.get("binary_data_size")
    if (data is _UNSET) == (size is None):
        raise InvalidArgument(
            f"must specify either 'data' or parameter 'binary_data_size' for input '{name}', not "
            + ("both" if size is not None else "neither")
        )
    if data is not _UNSET:
        return Tensor(name, datatype, json_data.decode(name, datatype, shape, data)), offset
    assert type(size) is int
    if size > len(body) - offset:
        raise InvalidArgument(
            f"unexpected size for input '{name}', expecting {size} bytes, got {len(body) - offset}"
        )
    part = body[offset : offset + size]
    return Tensor(name, datatype, raw.decode(name, datatype, shape, part)), offset + size


def _outputs(outputs: Any, request: InferRequest, form: ReplyForm) -> None:
    if type(outputs) is not list:
        raise InvalidArgument("Unable to parse 'outputs': it must be an array")
    names, classification = [], {}
    for item in outputs:
        name = item.get("name") if type(item) is dict else None
        if type(name) is not str:
            raise InvalidArgument("Unable to parse 'outputs': each needs a 'name'")
        parameters = _parameters(item)
        oip_parameters.refuse_shared_memory(parameters)
        if "classification" in parameters:
            classification[name] = int(parameters["classification"])
        # Named, an output is JSON unless it says otherwise, whatever the request's default says.
        form.by_output[name] = bool(parameters.get("binary_data", False))
        names.append(name)
    request.outputs = tuple(names)
    request.classification = classification


def encode(response: InferResponse, form: ReplyForm) -> tuple[bytes, list[Buffer]]:
    """The JSON part and the binary parts behind it.

    Raises:
        InvalidArgument: an output cannot be written as JSON.
    """
    outputs, blobs, finite = [], [], True
    for tensor in response.outputs:
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype.value,
            "shape": tensor.data.shape,
        }
        if form.by_output.get(tensor.name, form.binary):
            blob = raw.encode(tensor)
            entry["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
        else:
            data = json_data.encode(tensor)
            finite = finite and (data.dtype.kind != "f" or bool(np.isfinite(data).all()))
            entry["data"] = data.tolist() if data.dtype == object else data
        outputs.append(entry)
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = str(response.model_version)
    if response.parameters:
        document["parameters"] = response.parameters
    document["outputs"] = outputs
    if finite:
        return json_text.dumps(document), blobs
    for entry in outputs:
        if isinstance(entry.get("data"), np.ndarray):
            entry["data"] = entry["data"].tolist()
    return json_text.dumps_any(document), blobs
