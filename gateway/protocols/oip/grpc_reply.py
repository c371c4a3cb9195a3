"""A reply whose tensors are copied once: behind the message, into the bytes that are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from gateway.wire.raw import Buffer

_LENGTH_DELIMITED = 2
_RAW_FIELD = pb.ModelInferResponse.DESCRIPTOR.fields_by_name["raw_output_contents"].number
_RAW_TAG = bytes((_RAW_FIELD << 3 | _LENGTH_DELIMITED,))


class RawReply:
    """``ModelInferResponse`` as a front needs it: something that serialises.

    A message is the concatenation of its fields. Through the message class the tensors would be
    copied three times more.
    """

    __slots__ = ("_contents", "_message")

    def __init__(self, message: Any, contents: Sequence[Buffer]) -> None:
        """``message`` lacks its ``raw_output_contents``, which are ``contents``."""
        self._message = message
        self._contents = contents

    def SerializeToString(self) -> bytes:  # noqa: N802 - as protobuf names it
        parts: list[Buffer] = [self._message.SerializeToString()]
        for content in self._contents:
            parts += (_RAW_TAG, _varint(len(content)), content)
        return b"".join(parts)


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)
