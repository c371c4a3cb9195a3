"""Tensors as raw bytes: little-endian and row-major, the binary tensor data extension of Triton.

BOOL is one byte. A BYTES element is its length as little-endian uint32, then its bytes. Sizes are
checked before anything is allocated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import offload
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, Tensor

Buffer = bytes | memoryview

#: numpy's own limit is 64.
MAX_RANK = 32
#: Limit of the product of the dimensions other than 0: 8-byte elements that fit an address space.
MAX_ELEMENTS = 2**59
#: Copying up to this size costs less than making a view.
COPIED_BYTES = 4096
#: BYTES elements between two checkpoints; larger tensors are coded off the event loop.
PIECE = 8192
#: A short string as an element of an array: the reference and the object.
STRING_BYTES = 8 + 40
_LENGTH = struct.Struct("<I")
_DATATYPES = {datatype.value: datatype for datatype in Datatype}


def parse_datatype(name: str, datatype: Any) -> Datatype:
    """Parse the datatype that a request gives for input ``name``.

    Raises:
        InvalidArgument: There is no such datatype.
    """
    try:
        return _DATATYPES[datatype]
    except (KeyError, TypeError):
        raise InvalidArgument(
            f"unexpected datatype {datatype!r} for input '{name}'; use one of "
            f"{', '.join(_DATATYPES)}"
        ) from None


def parse_shape(name: str, shape: Sequence[Any]) -> tuple[int, ...]:
    """Check a shape that a request gives for input ``name``.

    Raises:
        InvalidArgument: A dimension is not an integer >= 0, or the shape is too large.
    """
    if len(shape) > MAX_RANK:
        raise InvalidArgument(f"input '{name}' has {len(shape)} dimensions, at most {MAX_RANK}")
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise InvalidArgument(
                f"invalid shape for input '{name}': a dimension must be an integer >= 0, not "
                f"{size!r}"
            )
        count *= size or 1
    if MAX_ELEMENTS < count < 2**63:
        raise InvalidArgument(f"byte size overflow for input '{name}' of shape {list(shape)}")
    if count > MAX_ELEMENTS:
        raise InvalidArgument(
            f"shape of input '{name}' causes total element count to exceed maximum size of "
            f"{MAX_ELEMENTS}"
        )
    return tuple(shape)


def decode(
    name: str, datatype: Datatype, shape: tuple[int, ...], data: Buffer, model: str = ""
) -> Array:
    """Decode ``data`` to an array of ``shape``, as a view if it is aligned.

    ``model`` is named in the error message.

    Raises:
        InvalidArgument: The size of ``data`` does not fit datatype and shape.
    """
    count = math.prod(shape)
    if datatype is Datatype.BYTES:
        return _decode_bytes(name, shape, count, data, model)
    dtype = NUMPY_DTYPES[datatype]
    expected = count * dtype.itemsize
    if len(data) != expected:
        raise size_mismatch(name, expected, len(data), model)
    if datatype is Datatype.BOOL and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise InvalidArgument(f"input '{name}' is BOOL; every byte must be 0 or 1")
    array: Array = np.ndarray(shape, dtype, data)
    # Runtimes may use aligned loads, and a view of a body may start at any offset.
    return array if array.flags.aligned else array.copy()


def size_mismatch(name: str, expected: int, got: int, model: str) -> InvalidArgument:
    return InvalidArgument(
        f"input byte size mismatch for input '{name}'{_of(model)}. Expected {expected}, got {got}"
    )


def _of(model: str) -> str:
    return f" for model '{model}'" if model else ""


def _decode_bytes(name: str, shape: tuple[int, ...], count: int, data: Buffer, model: str) -> Array:
    # Each element has a length field: a false shape is refused before anything is allocated.
    if count * _LENGTH.size > len(data):
        raise InvalidArgument(
            f"expected {count} string elements for inference input '{name}'{_of(model)}, got at "
            f"most {len(data) // _LENGTH.size}"
        )
    items, offset, end = [], 0, len(data)
    while offset < end:
        if end - offset < _LENGTH.size:
            raise InvalidArgument(f"incomplete string length indicator for input '{name}'")
        (length,) = _LENGTH.unpack_from(data, offset)
        offset += _LENGTH.size
        if length > end - offset:
            raise InvalidArgument(
                f"incomplete string data for input '{name}', expecting string of length {length} "
                f"but only {end - offset} bytes available"
            )
        items.append(bytes(data[offset : offset + length]))
        offset += length
        if not len(items) % PIECE:
            offload.checkpoint()
    if len(items) < count:
        raise InvalidArgument(
            f"expected {count} string elements for inference input '{name}'{_of(model)}, got "
            f"{len(items)}"
        )
    if len(items) > count:
        raise InvalidArgument(
            f"unexpected number of string elements {count + 1} for inference input "
            f"'{name}'{_of(model)}, expecting {count}"
        )
    return object_array(items, shape)


def object_array(items: list[bytes], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(shape)


def encode(tensor: Tensor) -> Buffer:
    """Encode ``tensor``; a large contiguous one as a view of its memory."""
    if tensor.datatype is Datatype.BYTES:
        encoded = bytearray()
        for index, item in enumerate(tensor.data.reshape(-1)):
            encoded += _LENGTH.pack(len(item))
            encoded += item
            if not index % PIECE:
                offload.checkpoint()
        return bytes(encoded)
    dtype = NUMPY_DTYPES[tensor.datatype]
    if tensor.data.nbytes <= COPIED_BYTES and tensor.data.dtype == dtype:
        return tensor.data.tobytes()
    data = np.ascontiguousarray(tensor.data, dtype)
    return data.reshape(-1).view(np.uint8).data
