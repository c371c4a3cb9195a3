"""Incremental parser of large protobuf messages.

protobuf holds the interpreter lock while it parses: half a second for 64 MB of small fields. But
merging the parts of a message one after the other gives the whole message. So runs of small fields
are merged in pieces, and large fields are split further.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from modelport.gateway.errors import InvalidArgument
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
_STRINGS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_KEY = 1
_MAX_VARINT = 10
#: Limit of the messages in a request: each takes dozens of times the memory of its two bytes.
MAX_MESSAGES = 100_000
#: Limit of the fields of a large request: its inputs, outputs and parameters together.
MAX_TENSORS = 10_000
#: Longer than the name and version of any model. A text of megabytes takes long to look up.
MAX_NAME_BYTES = 4096
#: Limits of the values of a repeated field, which are held in 8 bytes and in 16. Large tensors are
#: read by ``repeated_values`` instead.
MAX_NUMBERS, MAX_STRINGS = 1 << 21, 1 << 20


class _RepeatedFields(NamedTuple):
    """The tags of a message's fields that hold messages, and its repeated fields with limits."""

    messages: frozenset[int]
    limits: tuple[tuple[str, int], ...]


@lru_cache(256)
def _repeated(kind: Any) -> _RepeatedFields:
    messages, limits = set(), []
    for field in kind.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            messages.add(field.number << 3 | _DELIMITED)
        elif field.is_repeated and field.type in _STRINGS:
            limits.append((field.name, MAX_STRINGS))
        elif field.is_repeated and field.type in _VARINTS:
            limits.append((field.name, MAX_NUMBERS))
    return _RepeatedFields(frozenset(messages), tuple(limits))


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
            if not 8 <= tag < 1 << 32:  # no field 0; some parsers take the lower 32 bits
                raise IndexError
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
    """Return the first field with this tag, which names a model, if it is among the first ``most``.

    Raises:
        InvalidArgument: It is longer than any name.
    """
    try:
        for index, field in enumerate(fields(content)):
            if field.tag == tag:
                if field.end - field.start > MAX_NAME_BYTES:
                    raise InvalidArgument(
                        f"the name or version of the model is longer than {MAX_NAME_BYTES} bytes"
                    )
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
        InvalidArgument: As ``merge``.
    """
    message = kind()
    merge(message, memoryview(content))
    return message


class _Budget:
    """The number of messages that may still be read."""

    def __init__(self) -> None:
        self.messages = MAX_MESSAGES


def merge(message: Any, content: memoryview, budget: _Budget | None = None) -> None:
    """Merge ``content`` into ``message``, as ``message.MergeFromString``.

    Raises:
        DecodeError: ``content`` is not a message of this class.
        InvalidArgument: It has more than ``MAX_MESSAGES`` messages, or too many values.
    """
    begin, repeated = 0, _repeated(message.DESCRIPTOR)
    budget = budget or _Budget()
    for field in fields(content):
        if field.tag in repeated.messages:
            budget.messages -= 1
            if budget.messages < 0:
                raise InvalidArgument(f"the request has more than {MAX_MESSAGES} items")
        if field.end - field.start > PIECE_BYTES:
            _merge_piece(message, content[begin : field.begin])
            _large(message, field, content, budget)
            begin = field.end
        elif field.end - begin > PIECE_BYTES:
            _merge_piece(message, content[begin : field.end])
            begin = field.end
    _merge_piece(message, content[begin:])


def merge_short(message: Any, content: memoryview, tag: int) -> Iterator[memoryview]:
    """Merge ``content`` into ``message``, but yield the values of long fields with this ``tag``.

    Raises:
        DecodeError: ``content`` is not a message of this class.
        InvalidArgument: It has more than ``MAX_TENSORS`` fields, or as ``merge``.
    """
    begin = 0
    for count, field in enumerate(fields(content)):
        if count > MAX_TENSORS:
            raise InvalidArgument(f"the request has more than {MAX_TENSORS} tensors")
        if field.tag == tag and field.end - field.start > PIECE_BYTES:
            merge(message, content[begin : field.begin])
            begin = field.end
            yield content[field.start : field.end]
    merge(message, content[begin:])


def _merge_piece(message: Any, content: Buffer) -> None:
    if len(content):
        message.MergeFromString(content)
        for name, most in _repeated(message.DESCRIPTOR).limits:
            if len(getattr(message, name)) > most:
                raise InvalidArgument(f"'{name}' of the request has more than {most} values")
        offload.checkpoint()


def _large(message: Any, field: ProtobufField, content: memoryview, budget: _Budget) -> None:
    known = message.DESCRIPTOR.fields_by_number.get(field.tag >> 3)
    value = content[field.start : field.end]
    if known is None:
        return
    if known.type == FieldDescriptor.TYPE_MESSAGE:
        if known.message_type.GetOptions().map_entry:
            key, content = entry(known.message_type, value)
            container = getattr(message, known.name)
            if known.message_type.fields_by_name["value"].type == FieldDescriptor.TYPE_MESSAGE:
                merge(container[key], content, budget)
            else:
                container[key] = bytes(content)
        elif known.is_repeated:
            merge(getattr(message, known.name).add(), value, budget)
        else:
            child = getattr(message, known.name)
            child.SetInParent()
            merge(child, value, budget)
    elif known.is_repeated and known.type not in _STRINGS:
        for piece in packed_pieces(known, value, PIECE_BYTES):
            _merge_piece(message, piece)
    else:
        message.MergeFromString(content[field.begin : field.end])


def entry(kind: Any, content: memoryview) -> tuple[Any, memoryview]:
    """Return the key and the value of a map entry.

    Raises:
        DecodeError: ``content`` is not an entry.
    """
    key: Any = kind.fields_by_number[_KEY].default_value
    value = content[:0]
    for field in fields(content):
        part = content[field.start : field.end]
        if field.tag >> 3 != _KEY:
            value = part
            continue
        try:
            key = str(part, "utf-8")
        except UnicodeDecodeError as error:
            raise DecodeError("Error parsing message") from error
    return key, value


def packed_pieces(known: FieldDescriptor, value: memoryview, size: int) -> Iterator[bytes]:
    """Split the packed ``value`` of a field into messages with about ``size`` bytes of it each.

    Raises:
        DecodeError: ``value`` is not packed.
    """
    tag, varints, start = varint(known.number << 3 | _DELIMITED), known.type in _VARINTS, 0
    while start < len(value):
        end = min(start + size, len(value))
        while varints and end < len(value) and value[end - 1] > 0x7F:
            end += 1
            if end - start > size + _MAX_VARINT:
                raise DecodeError("Error parsing message")
        piece = value[start:end]
        yield tag + varint(len(piece)) + bytes(piece)
        start = end
