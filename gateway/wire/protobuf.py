"""Protobuf messages by their bytes, for those that carry tensors: what is large is never copied.

A message is the concatenation of its fields
(https://protobuf.dev/programming-guides/encoding/), so one can be sent in parts, and read without
its class where most of it is known.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from modelport.gateway.wire.raw import COPIED_BYTES, Buffer

_LENGTH_DELIMITED = 2
#: Messages with more are left to whoever reads large ones.
MAX_BLOBS = 1024
#: Of any length that a message can have.
_LENGTH_BYTES = 5
_ONE_BYTE = [bytes((number,)) for number in range(128)]


def tag(message: Any, field: str) -> int:
    """What stands in front of a string, bytes or message ``field`` of a message class.

    One byte: its number is at most 15.
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
    """A field that is a message: ``field`` is its tag, ``parts`` are its bytes."""
    return [bytes((field,)) + varint(sum(map(len, parts))), *parts]


def joined(parts: Sequence[Buffer]) -> list[Buffer]:
    """``parts`` with those beside each other in one piece that are small."""
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
    """The length at ``offset``, and the offset behind it.

    Raises:
        IndexError: it is cut off, or longer than any length.
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
    """``content`` as its head, its id and its blobs, which are its last fields.

    A blob of more than ``COPIED_BYTES`` is a view of ``content``, and may lie anywhere. None: the
    message has other fields, in another order, or it is none.

    Args:
        head: the tags of the fields that make the head.
        identity: the tag of the id, a string.
        blob: the tag of the blobs.
        max_head_bytes: a larger head is None.
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
                # In place, hardly any would lie where its datatype has to.
                blobs.append(bytes(part) if length <= COPIED_BYTES else part)
            elif blobs:
                return None
            elif field == identity and not id_end:
                id_at, id_end, id_text = offset, stop, str(content[start:stop], "utf-8")
            elif field not in head:
                return None
            offset = stop
    except (IndexError, UnicodeDecodeError):
        return None
    if offset != end or not blobs or head_end > max_head_bytes:
        return None
    return bytes(content[:id_at]) + bytes(content[id_end:head_end]), id_text, blobs
