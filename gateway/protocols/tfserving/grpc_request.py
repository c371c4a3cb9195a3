"""Parsing of TensorFlow Serving's gRPC requests, without the values of large tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import offload
from modelport.gateway.wire import incremental_protobuf
from modelport.gateway.wire.incremental_protobuf import PIECE_BYTES
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.protobuf import tag

#: Limit of the fields of a large Predict request: its inputs and its filter's outputs together.
MAX_TENSORS = 10_000
_INPUTS = tag(pb.PredictRequest, "inputs")
_ENTRY = pb.PredictRequest.DESCRIPTOR.fields_by_name["inputs"].message_type


class TfServingRequest(NamedTuple):
    """A message, and its size in bytes."""

    message: Any
    size: int
    #: Large tensors of Predict by the input's name, which are not in the message.
    tensors: Mapping[str, memoryview] = MappingProxyType({})

    def names(self) -> set[str]:
        """The names of the inputs of Predict."""
        return {*self.message.inputs, *self.tensors}


class SizedMessage:
    """Message class that returns a ``TfServingRequest``."""

    def __init__(self, kind: Any) -> None:
        self.DESCRIPTOR = kind.DESCRIPTOR
        self._kind = kind

    def FromString(self, content: bytes | memoryview) -> TfServingRequest:  # noqa: N802
        """Parse a message, as protobuf names it.

        Raises:
            DecodeError: ``content`` is not a message.
            InvalidArgument: It has more items than any valid request.
        """
        size = len(content)
        if size <= offload.INLINE_BYTES:
            return TfServingRequest(self._kind.FromString(content), size)
        return self._large(memoryview(content))

    def _large(self, content: memoryview) -> TfServingRequest:
        return TfServingRequest(incremental_protobuf.parse(self._kind, content), len(content))


class PredictMessage(SizedMessage):
    """Message class of Predict, which leaves large tensors serialized."""

    def __init__(self) -> None:
        super().__init__(pb.PredictRequest)

    def _large(self, content: memoryview) -> TfServingRequest:
        message, tensors, begin = pb.PredictRequest(), {}, 0
        for count, field in enumerate(incremental_protobuf.fields(content)):
            if count > MAX_TENSORS:
                raise InvalidArgument(f"the request has more than {MAX_TENSORS} tensors")
            if field.tag == _INPUTS and field.end - field.start > PIECE_BYTES:
                incremental_protobuf.merge(message, content[begin : field.begin])
                begin = field.end
                name, tensor = incremental_protobuf.entry(_ENTRY, content[field.start : field.end])
                tensors[name] = tensor
        incremental_protobuf.merge(message, content[begin:])
        return TfServingRequest(message, len(content), tensors)
