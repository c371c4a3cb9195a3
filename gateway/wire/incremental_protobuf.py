"""Incremental parser of large protobuf messages.

protobuf holds the interpreter lock while it parses: half a second for 64 MB of small fields. But
merging the parts of a message one after the other gives the whole message. So runs of small fields
are merged in pieces, and large fields are split further.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from modelport.gateway.runtime import offload
from modelport.gateway.wire.protobuf import read_varint, varint
from modelport.gateway.wire.raw_tensors import Buffer

PIECE_BYTES = 64 * 1024
_VARINT, _EIGHT, _DELIMITED, _FOUR = 0, 1, 2, 5
_VARINTS = frozenset(
    {
        FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_ENUM, FieldDescriptor.TYPE_INT32,
        FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SINT64,
    }
)  # fmt: skip
_KEY = 1
_MAX_VARINT = 10


class ProtobufField(NamedTuple):
    """Position of a field and its value; ``tag`` is the field number and the wire type."""

    tag: int
    begin: int
    start: int
    end: int


def fields(content: Buffer) -> Iterator[ProtobufField]:
    """Iterate over the fields of a message.

    Raises:
        DecodeError: ``content`` is not a message.
    """
    offset, size = 0, len(content)
    try:
        while offset < size:
            begin, tag = offset, content[offset]
            offset += 1
            if tag > 0x7F:
                tag, offset = read_varint(content, begin)
            start, kind = offset, tag & 7
            if kind == _DELIMITED:
                length = content[offset]
                start = offset + 1
                if length > 0x7F:
                    length, start = read_varint(content, offset)
                offset = start + length
            elif kind == _VARINT:
                while content[offset] > 0x7F:
                    offset += 1
                offset += 1
                if offset - start > _MAX_VARINT:
                    raise IndexError
            elif kind in (_FOUR, _EIGHT):
                offset += 4 if kind == _FOUR else 8
            else:
                raise IndexError
            if offset > size:
                raise IndexError
            yield ProtobufField(tag, begin, start, offset)
    except IndexError as error:
        raise DecodeError("Error parsing message") from error


def first(content: Buffer, tag: int, most: int = 16) -> bytes | None:
    """Return the value of the first field with this tag, if it is among the first ``most``."""
    try:
        for index, field in enumerate(fields(content)):
            if field.tag == tag:
                return bytes(content[field.start : field.end])
            if index == most:
                break
    except DecodeError:
        pass  # ``content`` may be the beginning of a message
    return None


def parse(kind: Any, content: Buffer) -> Any:
    """Parse ``content``, as ``kind.FromString``.

    Raises:
        DecodeError: ``content`` is not a message of this class.
    """
    message = kind()
    merge(message, memoryview(content))
    return message


def merge(message: Any, content: memoryview) -> None:
    """Merge ``content`` into ``message``, as ``message.MergeFromString``.

    Raises:
        DecodeError: ``content`` is not a message of this class.
    """
    begin = 0
    for field in fields(content):
        if field.end - field.start > PIECE_BYTES:
            _merge_piece(message, content[begin : field.begin])
            _large(message, field, content)
            begin = field.end
        elif field.end - begin > PIECE_BYTES:
            _merge_piece(message, content[begin : field.end])
            begin = field.end
    _merge_piece(message, content[begin:])


def _merge_piece(message: Any, content: memoryview) -> None:
    if len(content):
        message.MergeFromString(content)
        offload.checkpoint()


def _large(message: Any, field: ProtobufField, content: memoryview) -> None:
    known = message.DESCRIPTOR.fields_by_number.get(field.tag >> 3)
    value = content[field.start : field.end]
    if known is None:
        return
    if known.type == FieldDescriptor.TYPE_MESSAGE:
        if known.message_type.GetOptions().map_entry:
            _entry(getattr(message, known.name), known.message_type, value)
        elif known.is_repeated:
            merge(getattr(message, known.name).add(), value)
        else:
            child = getattr(message, known.name)
            child.SetInParent()
            merge(child, value)
    elif known.is_repeated and known.type not in (
        FieldDescriptor.TYPE_STRING,
        FieldDescriptor.TYPE_BYTES,
    ):
        _packed(message, field.tag, value, known.type in _VARINTS)
    else:
        message.MergeFromString(content[field.begin : field.end])


def _entry(container: Any, entry: Any, value: memoryview) -> None:
    """Add a map entry whose value is large."""
    key: Any = entry.fields_by_number[_KEY].default_value
    large = entry.fields_by_name["value"].type == FieldDescriptor.TYPE_MESSAGE
    content: memoryview = value[:0]
    for field in fields(value):
        if field.tag >> 3 == _KEY:
            key = _text(value[field.start : field.end])
        else:
            content = value[field.start : field.end]
    if large:
        merge(container[key], content)
    else:
        container[key] = bytes(content)


def _text(value: memoryview) -> str:
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError as error:
        raise DecodeError("Error parsing message") from error


def _packed(message: Any, tag: int, value: memoryview, varints: bool) -> None:
    start = 0
    while start < len(value):
        end = min(start + PIECE_BYTES, len(value))
        while varints and end < len(value) and value[end - 1] > 0x7F:
            end += 1
            if end - start > PIECE_BYTES + _MAX_VARINT:
                raise DecodeError("Error parsing message")
        piece = value[start:end]
        message.MergeFromString(varint(tag) + varint(len(piece)) + bytes(piece))
        offload.checkpoint()
        start = end
