"""Protobuf encoding of messages that carry tensors, without copies of large fields.

A message is the concatenation of its fields (https://protobuf.dev/programming-guides/encoding/), so
it can be sent in parts, and a known layout can be read without the message class.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from modelport.gateway.wire.raw_tensors import COPIED_BYTES, Buffer

_LENGTH_DELIMITED = 2
#: Messages with more blobs are parsed as a whole.
MAX_BLOBS = 1024
#: Bytes of the longest length of a message.
_LENGTH_BYTES = 5
_ONE_BYTE = [bytes((number,)) for number in range(128)]


def tag(message: Any, field: str) -> int:
    """Return the tag of a string, bytes or message ``field`` of a message class.

    It is one byte if the field's number is at most 15.
    """
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return number << 3 | _LENGTH_DELIMITED


def varint(number: int) -> bytes:
    if number < len(_ONE_BYTE):
        return _ONE_BYTE[number]
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def nested(field: int, parts: Sequence[Buffer]) -> list[Buffer]:
    """Encode a message field with the tag ``field`` and the content ``parts``."""
    return [bytes((field,)) + varint(sum(map(len, parts))), *parts]


def joined(parts: Sequence[Buffer]) -> list[Buffer]:
    """Join consecutive small parts."""
    together: list[Buffer] = []
    small: list[Buffer] = []
    for part in parts:
        if len(part) <= COPIED_BYTES:
            small.append(part)
            continue
        if small:
            together.append(b"".join(small))
            small.clear()
        together.append(part)
    if small:
        together.append(b"".join(small))
    return together


def read_varint(content: Buffer, offset: int) -> tuple[int, int]:
    """Decode the length at ``offset``; return it and the offset after it.

    Raises:
        IndexError: It is truncated or too long.
    """
    number = 0
    for index in range(_LENGTH_BYTES):
        byte = content[offset + index]
        number |= (byte & 0x7F) << 7 * index
        if byte <= 0x7F:
            return number, offset + index + 1
    raise IndexError


def split(
    content: Buffer, head: Collection[int], identity: int, blob: int, max_head_bytes: int
) -> tuple[bytes, str, list[Buffer]] | None:
    """Split ``content`` into its head, its id and its blobs, which are its last fields.

    Return None for a message with another layout. A blob of more than ``COPIED_BYTES`` is a view of
    ``content``, without alignment.

    Args:
        head: Tags of the fields of the head.
        identity: Tag of the id, a string.
        blob: Tag of the blobs.
        max_head_bytes: Size limit of the head.
    """
    offset, end = 0, len(content)
    head_end = id_at = id_end = 0
    id_text = ""
    blobs: list[Buffer] = []
    try:
        while offset < end:
            field, length, start = content[offset], content[offset + 1], offset + 2
            if length > 0x7F:
                length, start = read_varint(content, offset + 1)
            stop = start + length
            if field == blob:
                if not blobs:
                    head_end = offset
                if len(blobs) == MAX_BLOBS:
                    return None
                part = content[start:stop]
                # Small blobs are copied, because a view would rarely be aligned.
                blobs.append(bytes(part) if length <= COPIED_BYTES else part)
            elif blobs:
                return None
            elif field == identity and not id_end:
                id_at, id_end, id_text = offset, stop, str(content[start:stop], "utf-8")
            elif field not in head or offset > max_head_bytes:
                return None
            offset = stop
    except (IndexError, UnicodeDecodeError):
        return None
    if offset != end or not blobs or head_end > max_head_bytes:
        return None
    return bytes(content[:id_at]) + bytes(content[id_end:head_end]), id_text, blobs
