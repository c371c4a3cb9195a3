"""Parsing of TensorFlow Serving's gRPC requests, without the values of large tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from modelport.gateway.runtime import offload
from modelport.gateway.wire import incremental_protobuf
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.protobuf import tag

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
        message = pb.PredictRequest()
        entries = incremental_protobuf.merge_short(message, content, _INPUTS)
        tensors = dict(incremental_protobuf.entry(_ENTRY, value) for value in entries)
        return TfServingRequest(message, len(content), tensors)
