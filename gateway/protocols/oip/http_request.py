"""Decoding of OIP's HTTP requests: JSON, with the binary tensor data extension.

Specification: Triton's ``docs/protocol`` and ``http_server.cc``.
"""

from __future__ import annotations

from typing import Any

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols.oip import parameters as oip_parameters
from modelport.gateway.protocols.oip.http_response import ResponseFormat
from modelport.gateway.protocols.oip.shared_memory import NO_SHARED_MEMORY, REGION, SharedTensors
from modelport.gateway.types import (
    Datatype,
    InferRequest,
    Parameter,
    Tensor,
    TensorSpec,
)
from modelport.gateway.wire import json_tensors, json_text, raw_tensors
from modelport.gateway.wire.raw_tensors import Buffer


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
