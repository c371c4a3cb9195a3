"""Decoding of ``ModelInferRequest``.

Successive requests of a client mostly differ only in their tensors, which are the last field of the
message. The head before them is parsed once and then looked up by its bytes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from modelport.gateway.errors import InvalidArgument, ModelportError
from modelport.gateway.protocols.oip import metadata
from modelport.gateway.protocols.oip import parameters as oip_parameters
from modelport.gateway.protocols.oip.grpc_stream import EMPTY_FINAL_RESPONSE
from modelport.gateway.protocols.oip.shared_memory import NO_SHARED_MEMORY, REGION, SharedTensors
from modelport.gateway.runtime import offload
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, InferRequest, Parameter, Tensor
from modelport.gateway.wire import incremental_protobuf, protobuf, raw_tensors, tensor_contents
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from modelport.gateway.wire.protobuf import tag

#: Number of cached heads, and their maximum size.
HEADS = 1024
MAX_TEMPLATE_BYTES = 2048
_TAGS = {field: tag(pb.ModelInferRequest, field) for field in (
    "id", "raw_input_contents", "model_name", "model_version", "inputs", "outputs"
)}  # fmt: skip
_ID, _RAW = _TAGS.pop("id"), _TAGS.pop("raw_input_contents")
_INPUTS = _TAGS["inputs"]
_CONTENTS = tag(pb.ModelInferRequest.InferInputTensor, "contents")
_NAME, _VERSION = _TAGS["model_name"], _TAGS["model_version"]
#: Fields of a cached head. Parameters are not among them, because they may change every time.
_HEAD_FIELDS = frozenset(_TAGS.values())


class RawRequest:
    """Message class of ``ModelInfer``, which decodes a plain request from its bytes."""

    DESCRIPTOR = pb.ModelInferRequest.DESCRIPTOR

    @staticmethod
    def FromString(content: bytes | memoryview) -> Any:  # noqa: N802 - as protobuf names it
        """Return an ``InferRequest`` if ``content`` is plain and valid, else as ``LargeRequest``.

        Raises:
            DecodeError: ``content`` is not a message.
        """
        request = plain_request(content)
        return LargeRequest.FromString(content) if request is None else request


class LargeMessage:
    """A ``ModelInferRequest`` whose long input contents are not parsed.

    Attributes:
        contents: The serialized contents by the input's index.
    """

    def __init__(self) -> None:
        self.message = pb.ModelInferRequest()
        self.contents: dict[int, memoryview] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)

    def ByteSize(self) -> int:  # noqa: N802 - as protobuf names it
        size: int = self.message.ByteSize()
        return size + sum(map(len, self.contents.values()))


class LargeRequest:
    """Message class of ``ModelInferRequest`` for requests of any size."""

    DESCRIPTOR = pb.ModelInferRequest.DESCRIPTOR

    @staticmethod
    def FromString(content: bytes | memoryview) -> Any:  # noqa: N802 - as protobuf names it
        """Parse a small request completely, and a large one as a ``LargeMessage``.

        Raises:
            DecodeError: ``content`` is not a message.
            InvalidArgument: It has too many tensors and parameters.
        """
        if len(content) <= offload.INLINE_BYTES:
            return pb.ModelInferRequest.FromString(content)
        large = LargeMessage()
        message, view = large.message, memoryview(content)
        for value in incremental_protobuf.merge_short(message, view, _INPUTS):
            large.contents |= _input(message, value)
        return large


def _input(message: Any, content: memoryview) -> dict[int, memoryview]:
    """Add a long input to ``message`` without parsing its contents."""
    item, index, begin = message.inputs.add(), len(message.inputs) - 1, 0
    found: dict[int, memoryview] = {}
    for field in incremental_protobuf.fields(content):
        if field.tag == _CONTENTS and not found:
            incremental_protobuf.merge(item, content[begin : field.begin])
            begin = field.end
            found[index] = content[field.start : field.end]
            item.contents.SetInParent()
    incremental_protobuf.merge(item, content[begin:])
    return found


class _Head(NamedTuple):
    """A request without its id and its tensors' data.

    ``inputs`` are tuples of name, datatype, dtype, shape and size in bytes.
    """

    model_name: str
    model_version: int
    inputs: tuple[tuple[str, Datatype, np.dtype[Any], tuple[int, ...], int], ...]
    outputs: tuple[str, ...]
    classification: dict[str, int]


def plain_request(content: bytes | memoryview) -> InferRequest | None:
    """Decode a valid request whose tensors are all raw; return None for others."""
    parts = protobuf.split(content, _HEAD_FIELDS, _ID, _RAW, MAX_TEMPLATE_BYTES)
    if parts is None:
        return None
    head_bytes, id_text, blobs = parts
    head = _head(head_bytes)
    if head is None or len(head.inputs) != len(blobs):
        return None
    tensors = []
    for (name, datatype, dtype, shape, size), blob in zip(head.inputs, blobs, strict=True):
        if len(blob) != size:
            return None
        tensors.append(Tensor(name, datatype, np.ndarray(shape, dtype, blob)))
    request = InferRequest(head.model_name, tensors, head.outputs, head.model_version, id_text)
    if head.classification:
        request.classification = head.classification
    return request


def model_of(content: bytes | memoryview) -> tuple[str, int]:
    """Read the model and version of a ``ModelInferRequest``, which are its first fields.

    The name is empty if they are missing, or in another order. One that is too long for any model
    is cut: looking it up would take long.
    """
    found, offset = {_NAME: "", _VERSION: ""}, 0
    try:
        for field in found:
            if offset < len(content) and content[offset] == field:
                length, start = protobuf.read_varint(content, offset + 1)
                offset = start + length
                end = min(offset, start + incremental_protobuf.MAX_NAME_BYTES)
                found[field] = str(
                    content[start:end], "utf-8", "strict" if end == offset else "replace"
                )
        return found[_NAME], metadata.parse_version(found[_VERSION])
    except (IndexError, UnicodeDecodeError, ModelportError):
        return "", 0


def named_model(content: bytes | memoryview) -> tuple[str, int]:
    """Read the model and version of a large request, as ``model_of``.

    Raises:
        InvalidArgument: The message does not begin with them; serializers write fields in order.
    """
    named = model_of(content) if content and content[0] == _NAME else ("", 0)
    if not named[0]:
        raise InvalidArgument(
            "a large request must begin with its model_name and a valid model_version, if any"
        )
    return named


@lru_cache(HEADS)
def _head(content: bytes) -> _Head | None:
    """Parse a head; None if such requests must be parsed completely."""
    try:
        message = pb.ModelInferRequest.FromString(content)
        inputs = []
        for item in message.inputs:
            datatype = raw_tensors.parse_datatype(item.name, item.datatype)
            shape = raw_tensors.parse_shape(item.name, item.shape)
            data_elsewhere = item.HasField("contents") or REGION in item.parameters
            if data_elsewhere or datatype in (Datatype.BYTES, Datatype.BOOL):
                return None
            dtype = NUMPY_DTYPES[datatype]
            size = math.prod(shape) * dtype.itemsize
            inputs.append((item.name, datatype, dtype, shape, size))
        request = InferRequest("", [])
        _outputs(message.outputs, request, NO_SHARED_MEMORY)
        number = metadata.parse_version(message.model_version)
    except (DecodeError, ModelportError):
        return None
    outputs, classification = request.outputs, dict(request.classification)
    return _Head(message.model_name, number, tuple(inputs), outputs, classification)


def decode(message: Any, shared: SharedTensors = NO_SHARED_MEMORY) -> InferRequest:
    """Decode a ``ModelInferRequest`` or a ``LargeMessage``.

    Raises:
        InvalidArgument: An input is invalid; the message names it.
        Unsupported: The request uses shared memory, which is not enabled.
    """
    blobs = message.raw_input_contents
    if blobs and len(blobs) != len(message.inputs):
        _check_count(message)
    tensors, index = [], 0
    for place, item in enumerate(message.inputs):
        name = item.name
        datatype = raw_tensors.parse_datatype(name, item.datatype)
        shape = raw_tensors.parse_shape(name, item.shape)
        if item.parameters and REGION in item.parameters:
            data = _shared_input(item, datatype, shape, shared, message.model_name)
        elif blobs:
            if item.HasField("contents"):
                raise _unexpected_contents(name, message.model_name)
            data = raw_tensors.decode(name, datatype, shape, blobs[index], message.model_name)
            index += 1
        else:
            long = message.contents.get(place) if type(message) is LargeMessage else None
            if long is None:
                data = tensor_contents.decode(name, datatype, shape, item.contents)
            else:
                data = tensor_contents.decode_bytes(name, datatype, shape, long)
        tensors.append(Tensor(name, datatype, data))
    if index != len(blobs):
        _check_count(message)
    request = InferRequest(
        message.model_name,
        tensors,
        model_version=metadata.parse_version(message.model_version),
        id=message.id,
    )
    if message.parameters:
        request.parameters = {key: _parameter(key, p) for key, p in message.parameters.items()}
    if message.outputs:
        _outputs(message.outputs, request, shared)
    return request


def _unexpected_contents(name: str, model: str) -> InvalidArgument:
    return InvalidArgument(
        "contents field must not be specified when using raw_input_contents for "
        f"'{name}' for model '{model}'"
    )


def _check_count(message: Any) -> None:
    """Check that there is one raw content for each input that is not in shared memory."""
    for item in message.inputs:
        if item.HasField("contents") and REGION not in item.parameters:
            raise _unexpected_contents(item.name, message.model_name)
    expected = sum(REGION not in item.parameters for item in message.inputs)
    if len(message.raw_input_contents) != expected:
        raise InvalidArgument(
            f"expected {expected} raw_input_contents, one for each input, but got "
            f"{len(message.raw_input_contents)} for model '{message.model_name}'"
        )


def _shared_input(
    item: Any, datatype: Datatype, shape: tuple[int, ...], shared: SharedTensors, model: str
) -> Array:
    if item.HasField("contents"):
        raise InvalidArgument(
            f"contents field must not be specified when using shared memory for '{item.name}'"
        )
    parameters = {key: _parameter(key, p) for key, p in item.parameters.items()}
    return shared.read(item.name, datatype, shape, parameters, model)


def _parameter(key: str, parameter: Any) -> Parameter:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidArgument(f"parameter '{key}' has no value")
    value: Parameter = getattr(parameter, choice)
    if key != EMPTY_FINAL_RESPONSE:  # the only reserved key that clients may set
        oip_parameters.check(key, value)
    return value


def _outputs(outputs: Any, request: InferRequest, shared: SharedTensors) -> None:
    classification = {}
    for output in outputs:
        if REGION in output.parameters:
            parameters = {key: _parameter(key, p) for key, p in output.parameters.items()}
            shared.expect(output.name, parameters)
        if "classification" in output.parameters:
            count = _parameter("classification", output.parameters["classification"])
            classification[output.name] = int(count)
    request.outputs = tuple(output.name for output in outputs)
    request.classification = classification
