"""The content of one request and its response, gathered while they pass, for the recorder."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from modelport.gateway.types import Array, Datatype, InferRequest, InferResponse, Tensor

#: A message of gRPC that is not compressed, before its length.
_PREFIX = struct.Struct(">BI")
Content = bytes | memoryview
#: A reference to an element of a BYTES tensor.
_REFERENCE_BYTES = 8


class CapturedTensor(NamedTuple):
    """A tensor of a request, or of its response with the number ``response``."""

    name: str
    datatype: Datatype
    data: Array
    response: int = 0


class CapturedInference(NamedTuple):
    """The tensors of one call of a model; a request of some dialects makes several calls."""

    inputs: list[CapturedTensor]
    outputs: list[CapturedTensor]


class CapturedTraffic:
    """References to the content of a request that is to be recorded.

    A content that somebody may still change is copied. One of more than ``most_bytes`` is given up.

    Attributes:
        draw: The number in [0, 1) that decides with the share of the model.
        target: Path and query of the request over HTTP.
        fields: The headers of the request; the recorder sets them.
        request, response: The parts of the bodies; over gRPC with the prefixes of messages.
        was_read: Whether all of the request's body is noted, which may be empty.
        unread: Takes the body from the connection if it has come; None: there is none.
        headers: Of the response.
        size: The bytes that are held.
        is_too_large: Whether the content was given up.
        is_sealed: Whether the request has ended: the recorder's thread reads the content, and what
            comes now is not noted.
    """

    __slots__ = (
        "_most_bytes", "draw", "fields", "headers", "inferences", "is_sealed", "is_too_large",
        "request", "response", "size", "target", "unread", "was_read",
    )  # fmt: skip

    def __init__(self, draw: float, most_bytes: int) -> None:
        self.draw, self._most_bytes = draw, most_bytes
        self.target, self.was_read = b"", False
        self.fields: Mapping[bytes, bytes] = {}
        self.unread: Callable[[], Content | None] | None = None
        self.request: list[bytes] = []
        self.response: list[bytes] = []
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        self.inferences: list[CapturedInference] = []
        self.size, self.is_too_large, self.is_sealed = 0, False, False

    def received(self, content: Content) -> None:
        """Note a part of the request's body."""
        self.was_read = True
        if self._has_room(len(content)):
            self.request.append(bytes(content))

    def take_unread(self, status: int) -> None:
        """Note the body of a request that has ended and that nobody has read.

        A request that is refused for its head has one, too; of strangers' nothing is kept.
        """
        take, self.unread = self.unread, None
        if take is None or self.was_read or status in (401, 403):
            return
        content = take()
        if content is not None:
            self.received(content)

    def sent(self, content: Content) -> None:
        """Note a part of the response's body."""
        if self._has_room(len(content)):
            self.response.append(bytes(content))

    def received_message(self, content: Content, is_compressed: bool = False) -> None:
        """Note a message of gRPC that came without its prefix."""
        self.received(_PREFIX.pack(is_compressed, len(content)))
        self.received(content)

    def sent_message(self, parts: Sequence[Content]) -> None:
        """Note a message of gRPC that is sent."""
        self.sent(_PREFIX.pack(0, sum(map(len, parts))))
        for part in parts:
            self.sent(part)

    def infers(self, request: InferRequest) -> CapturedInference:
        """Note the inputs of a call, as they are on the wire."""
        made = CapturedInference(self._held(request.inputs), [])
        self.inferences.append(made)
        return made

    def inferred(self, call: CapturedInference, response: InferResponse) -> None:
        """Note the outputs of a response, in the shapes of the wire."""
        before = call.outputs[-1].response + 1 if call.outputs else 0
        call.outputs.extend(self._held(response.outputs, before))

    def _held(self, tensors: list[Tensor], response: int = 0) -> list[CapturedTensor]:
        held = []
        for each in tensors:
            size = each.size_bytes
            if each.datatype is Datatype.BYTES:
                size += each.data.size * _REFERENCE_BYTES
            if self._has_room(size):
                data = each.data if _is_lasting(each.data) else each.data.copy()
                held.append(CapturedTensor(each.name, each.datatype, data, response))
        return held

    def fits(self, size: int) -> bool:
        """Whether a further ``size`` bytes may be noted; if not, all is given up."""
        if self.is_sealed:
            return False
        if self.size + size > self._most_bytes and not self.is_too_large:
            self.is_too_large = True
            for each in (self.request, self.response, self.inferences):
                each.clear()
        return not self.is_too_large

    def _has_room(self, size: int) -> bool:
        fits = self.fits(size)
        if fits:
            self.size += size
        return fits


def _is_lasting(data: Array) -> bool:
    """Whether nobody else changes an array, and it holds no larger one in memory.

    A view may be one of a client's shared memory, or of a batch.
    """
    owner: object = data.base
    return owner is None or type(owner) is bytes
