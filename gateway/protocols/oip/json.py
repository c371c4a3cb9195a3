"""OIP's JSON requests and responses, with the binary tensor data extension.

Specification: Triton's ``docs/protocol`` and ``http_server.cc``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols.oip import parameters as oip_parameters
from modelport.gateway.protocols.oip.shared_memory import NO_SHARED_MEMORY, REGION, SharedTensors
from modelport.gateway.types import (
    Array,
    Datatype,
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
    TensorSpec,
)
from modelport.gateway.wire import json_tensors, json_text, json_writer, raw_tensors
from modelport.gateway.wire.json_writer import PIECE
from modelport.gateway.wire.raw_tensors import Buffer

#: Number of cached parts of responses, each of some hundred bytes.
HEADS = 4096
#: To look up a member of an enumeration takes as long as the rest of ``is_large``.
_TEXT = Datatype.BYTES


@dataclass(slots=True)
class ResponseFormat:
    """Requested encoding of the outputs: JSON, binary data after the JSON, or shared memory."""

    binary: bool = False
    by_output: dict[str, bool] = field(default_factory=dict)
    shared: SharedTensors | None = None


def decode(
    body: Buffer,
    header_length: int,
    model_name: str,
    model_version: int,
    shared: SharedTensors = NO_SHARED_MEMORY,
) -> tuple[InferRequest, ResponseFormat]:
    """Decode a request whose JSON part is the first ``header_length`` bytes of ``body``.

    Raises:
        InvalidArgument: A member or an input is invalid; the message names it.
        Unsupported: The request uses shared memory, which is not enabled.
    """
    part = body if header_length == len(body) else memoryview(body)[:header_length]
    document = json_text.loads(part)
    try:
        return decode_document(document, body, header_length, model_name, model_version, shared)
    finally:
        json_text.discard(document, header_length)


def decode_document(
    document: Any,
    body: Buffer,
    header_length: int,
    model_name: str,
    model_version: int,
    shared: SharedTensors = NO_SHARED_MEMORY,
) -> tuple[InferRequest, ResponseFormat]:
    """Decode a request whose JSON part is parsed already, as ``decode``."""
    if type(document) is not dict:
        raise InvalidArgument("the request must be a JSON object")
    parameters = read_parameters(document) if "parameters" in document else {}
    request_id = document.get("id")
    if request_id is None:  # many clients send null for missing members
        request_id = ""
    if type(request_id) is not str:
        raise InvalidArgument("Unable to parse 'id': it must be a string")
    inputs = document.get("inputs")
    if type(inputs) is not list:
        raise InvalidArgument("Unable to parse 'inputs': it must be an array")
    tensors, offset = [], header_length
    for item in inputs:
        tensor, offset = _input(item, body, offset, shared, model_name)
        tensors.append(tensor)
    if offset != len(body):
        raise InvalidArgument(
            f"unexpected additional input data for model '{model_name}': {len(body) - offset} bytes"
        )
    form = ResponseFormat(bool(parameters) and bool(parameters.get("binary_data_output", False)))
    request = InferRequest(model_name, tensors, (), model_version, request_id, parameters)
    if document.get("outputs") is not None:
        read_outputs(document["outputs"], request, form, shared)
    return request, form


def decode_raw(
    body: Buffer, spec: TensorSpec, shape: tuple[int, ...], model_name: str, model_version: int
) -> tuple[InferRequest, ResponseFormat]:
    """Decode a body that is the raw data of a single input; its response is binary too."""
    if spec.datatype is Datatype.BYTES:  # one element, without a length field
        data = raw_tensors.object_array([bytes(body)], shape)
    else:
        data = raw_tensors.decode(spec.name, spec.datatype, shape, body, model_name)
    tensor = Tensor(spec.name, spec.datatype, data)
    return InferRequest(model_name, [tensor], model_version=model_version), ResponseFormat(
        binary=True
    )


def read_parameters(owner: dict[str, Any]) -> dict[str, Parameter]:
    """Read the parameters of a request, an input or an output, and check them."""
    parameters = owner.get("parameters")
    if parameters is None:
        return {}
    if type(parameters) is not dict:
        raise InvalidArgument("Unable to parse 'parameters': it must be an object")
    for key, value in parameters.items():
        oip_parameters.check(key, value)
    return parameters


def _input(
    item: Any, body: Buffer, offset: int, shared: SharedTensors, model: str
) -> tuple[Tensor, int]:
    """Decode an input; return it and the offset after its binary data."""
    if type(item) is not dict:
        raise InvalidArgument("Unable to parse 'inputs': each must be an object")
    name = item.get("name")
    if type(name) is not str:
        raise InvalidArgument("Unable to parse 'name' of an input: it must be a string")
    datatype = raw_tensors.parse_datatype(name, item.get("datatype"))
    shape = item.get("shape")
    if type(shape) is not list:
        raise InvalidArgument(f"Unable to parse 'shape' of input '{name}': it must be an array")
    shape = raw_tensors.parse_shape(name, shape)
    data = item.get("data")
    size = None
    if "parameters" in item:
        parameters = read_parameters(item)
        size = parameters.get("binary_data_size")
        if REGION in parameters:
            if data is not None or size is not None:
                raise InvalidArgument(
                    "must specify only one of 'data', 'binary_data_size' and "
                    f"'shared_memory_region' for input '{name}'"
                )
            array = shared.read(name, datatype, shape, parameters, model)
            return Tensor(name, datatype, array), offset
    if (data is None) == (size is None):
        raise InvalidArgument(
            f"must specify either 'data' or parameter 'binary_data_size' for input '{name}', not "
            + ("both" if size is not None else "neither")
        )
    if data is not None:
        return Tensor(name, datatype, json_tensors.decode(name, datatype, shape, data)), offset
    assert type(size) is int
    if size > len(body) - offset:
        raise InvalidArgument(
            f"unexpected size for input '{name}', expecting {size} bytes, got {len(body) - offset}"
        )
    part = memoryview(body)[offset : offset + size]
    return Tensor(
        name, datatype, raw_tensors.decode(name, datatype, shape, part, model)
    ), offset + size


def read_outputs(
    outputs: Any, request: InferRequest, form: ResponseFormat, shared: SharedTensors
) -> None:
    """Read the requested outputs and their encoding into ``request`` and ``form``."""
    if type(outputs) is not list:
        raise InvalidArgument("Unable to parse 'outputs': it must be an array")
    names, classification = [], {}
    for item in outputs:
        name = item.get("name") if type(item) is dict else None
        if type(name) is not str:
            raise InvalidArgument("Unable to parse 'outputs': each needs a 'name'")
        parameters = read_parameters(item)
        if REGION in parameters:
            shared.expect(name, parameters)
            form.shared = shared
        if "classification" in parameters:
            classification[name] = int(parameters["classification"])
        # ``binary_data_output`` applies only if no outputs are named.
        form.by_output[name] = bool(parameters.get("binary_data", False))
        names.append(name)
    request.outputs = tuple(names)
    request.classification = classification


def encode(response: InferResponse, form: ResponseFormat) -> tuple[Buffer, list[Buffer]]:
    """Encode a response as its JSON part and the binary parts after it.

    Raises:
        InvalidArgument: JSON cannot represent an output.
    """
    outputs: list[Buffer] = []
    large = False
    blobs: list[Buffer] = []
    for tensor in response.outputs:
        head = _output_head(tensor.name, tensor.datatype, tensor.data.shape)
        if form.shared is not None and form.shared.write(tensor):
            outputs.append(head + b"}")
        elif form.by_output.get(tensor.name, form.binary):
            blob = raw_tensors.encode(tensor)
            blobs.append(blob)
            outputs.append(b'%b,"parameters":{"binary_data_size":%d}}' % (head, len(blob)))
        elif not _is_large(tensor):
            outputs.append(b'%b,"data":%b}' % (head, _values(json_tensors.encode(tensor))))
        else:
            large = True
            parts = json_writer.parts(json_tensors.encode(tensor))
            outputs.append(json_writer.join((head, b',"data":', *parts, b"}")))
    head = _reply_head(response.model_name, response.model_version)
    if response.id:
        head = b'{"id":%b,%b' % (json_text.dumps(response.id), head[1:])
    if response.parameters:
        head += b'"parameters":%b,' % json_text.dumps_any(response.parameters)
    if large:
        pieces: list[Buffer] = []
        for output in outputs:
            pieces += (b"," if pieces else b'"outputs":[', output)
        return json_writer.join((head, *pieces, b"]}")), blobs
    return b'%b"outputs":[%b]}' % (head, b",".join(outputs)), blobs


@lru_cache(HEADS)
def _reply_head(model_name: str, model_version: int) -> bytes:
    document = {"model_name": model_name, "model_version": str(model_version)}
    return json_text.dumps(document)[:-1] + b","


@lru_cache(HEADS)
def _output_head(name: str, datatype: Datatype, shape: tuple[int, ...]) -> bytes:
    """Encode an output up to its data."""
    return json_text.dumps({"name": name, "datatype": datatype.value, "shape": shape})[:-1]


def _is_large(tensor: Tensor) -> bool:
    several = tensor.data.size > PIECE or tensor.datatype is _TEXT
    return several and json_writer.is_large(tensor.data)


def is_large(response: InferResponse, form: ResponseFormat) -> bool:
    """Whether encoding takes more than a millisecond; binary outputs do not."""
    for tensor in response.outputs:  # a loop is faster than ``any``, for every response
        if tensor.data.size <= PIECE and tensor.datatype is not _TEXT:
            continue
        in_json = not form.by_output.get(tensor.name, form.binary)
        if (in_json or tensor.datatype is _TEXT) and json_writer.is_large(tensor.data):
            return True
    return False


def _values(data: Array) -> bytes:
    if data.dtype == object:
        return json_text.dumps(data.tolist())
    text = json_text.dumps(data)
    # orjson writes null for NaN and infinities, and for no other number.
    if data.dtype.kind == "f" and text.find(b"null") >= 0:
        return json_text.dumps_any(data.tolist())
    return text
