"""Values of a repeated field in a large serialized message, without a message of all of them.

protobuf takes up to sixteen times the memory of a short value's bytes, and doubles it as it grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from modelport.gateway.runtime import offload
from modelport.gateway.types import Array
from modelport.gateway.wire import incremental_protobuf
from modelport.gateway.wire.incremental_protobuf import ProtobufField

#: Types whose packed values are an array's memory.
_FIXED: Mapping[int, np.dtype[Any]] = {
    FieldDescriptor.TYPE_FLOAT: np.dtype("<f4"),
    FieldDescriptor.TYPE_DOUBLE: np.dtype("<f8"),
}
_DELIMITED = 2
#: Size of a piece, whose values become objects of Python.
PIECE_BYTES = 16 * 1024


def pieces(
    kind: Any, name: str, content: memoryview, refused: frozenset[int] = frozenset()
) -> Iterator[Sequence[Any] | Array]:
    """Iterate over the values of the field ``name`` of a message of the class ``kind``, in pieces.

    Raises:
        DecodeError: ``content`` is not a message of this class, or has a field whose number is
            ``refused``.
    """
    known = kind.DESCRIPTOR.fields_by_name[name]
    tags = {known.number << 3 | wire_type for wire_type in range(8)}
    if known.type in _FIXED:  # to read them from memory keeps every bit
        tags.remove(known.number << 3 | _DELIMITED)
    size, begin = PIECE_BYTES, 0
    for field in incremental_protobuf.fields(content):
        if field.tag in tags and field.end - begin <= size:
            continue
        if field.tag >> 3 in refused:
            raise DecodeError("Error parsing message")
        wanted = field.tag >> 3 == known.number
        large = field.tag not in tags or field.end - field.start > size
        end = field.begin if large else field.end
        if end > begin:
            yield _values(kind, name, content[begin:end])
        if wanted and large:
            yield from _large(kind, known, field, content)
        begin = field.end
    if begin < len(content):
        yield _values(kind, name, content[begin:])


def _values(kind: Any, name: str, content: bytes | memoryview) -> Sequence[Any]:
    offload.checkpoint()
    values: Sequence[Any] = getattr(kind.FromString(content), name)
    return values


def _large(
    kind: Any,
    known: FieldDescriptor,
    field: ProtobufField,
    content: memoryview,
) -> Iterator[Sequence[Any] | Array]:
    """Iterate over the values of one large ``field``: of a packed one, or a single string."""
    dtype, value = _FIXED.get(known.type), content[field.start : field.end]
    if known.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        yield _values(kind, known.name, content[field.begin : field.end])
    elif dtype is None or field.tag & 7 != _DELIMITED:
        for piece in incremental_protobuf.packed_pieces(known, value, PIECE_BYTES):
            yield _values(kind, known.name, piece)
    elif len(value) % dtype.itemsize:
        raise DecodeError("Error parsing message")
    else:
        yield np.frombuffer(value, dtype)
