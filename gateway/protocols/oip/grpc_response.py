"""Encoding of ``InferResponse`` as the bytes of a ``ModelInferResponse``.

A message is the concatenation of its fields, so parts that do not change between responses are
serialized once, and large tensors are sent without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from modelport.gateway.protocols.grpc_method import Serialized
from modelport.gateway.protocols.oip.shared_memory import NO_SHARED_MEMORY, SharedTensors
from modelport.gateway.types import Datatype, InferResponse, Parameter
from modelport.gateway.wire import raw_tensors
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from modelport.gateway.wire.protobuf import tag, varint
from modelport.gateway.wire.raw_tensors import Buffer

#: Number of cached parts of responses, each of some hundred bytes.
KEPT = 4096
_ID = bytes((tag(pb.ModelInferResponse, "id"),))
_RAW = bytes((tag(pb.ModelInferResponse, "raw_output_contents"),))


def serialize(response: InferResponse, shared: SharedTensors = NO_SHARED_MEMORY) -> Serialized:
    """Encode ``response``, and write the outputs requested in shared memory there.

    Large tensors are views of their memory.

    Raises:
        InvalidArgument: An output is larger than its place in shared memory.
    """
    parts: list[Buffer] = [_head(response.model_name, response.model_version)]
    if response.id:
        text = response.id.encode()
        parts += (_ID, varint(len(text)), text)
    if response.parameters:
        parts.append(_parameters(response.parameters))
    contents: list[Buffer] = []
    for tensor in response.outputs:
        parts.append(_output(tensor.name, tensor.datatype, tensor.data.shape))
        # Clients index the contents by output: one in shared memory has empty contents.
        is_shared = shared.places and shared.write(tensor)
        content = b"" if is_shared else raw_tensors.encode(tensor)
        contents += (_RAW, varint(len(content)), content)
    parts += contents
    return Serialized(parts)


def encode(response: InferResponse, shared: SharedTensors = NO_SHARED_MEMORY) -> Any:
    """Encode ``response`` as a message, to be nested in another one."""
    return pb.ModelInferResponse.FromString(serialize(response, shared).SerializeToString())


@lru_cache(KEPT)
def _head(model_name: str, model_version: int) -> bytes:
    message = pb.ModelInferResponse(model_name=model_name, model_version=str(model_version))
    return bytes(message.SerializeToString())


@lru_cache(KEPT)
def _output(name: str, datatype: Datatype, shape: tuple[int, ...]) -> bytes:
    message = pb.ModelInferResponse()
    message.outputs.add(name=name, datatype=datatype.value, shape=shape)
    return bytes(message.SerializeToString())


def _parameters(parameters: Mapping[str, Parameter]) -> bytes:
    message = pb.ModelInferResponse()
    for key, value in parameters.items():
        kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
        if kind == "int64" and value >= 1 << 63:  # type: ignore[operator]
            kind = "uint64"  # the id of a sequence
        setattr(message.parameters[key], f"{kind}_param", value)
    return bytes(message.SerializeToString())
