"""Tensors in the ``data`` member of OIP's JSON."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import offload
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, Tensor
from modelport.gateway.wire import raw_tensors
from modelport.gateway.wire.long_array import LongArray

BINARY_ONLY = (Datatype.FP16, Datatype.BF16)
_LISTS = {list}
_INTEGERS: set[type] = {int}
_NUMBERS = {int, float}
#: By datatype: the JSON types of an element, and the type code of ``array``, which converts a short
#: list twice as fast as numpy. Values beyond FP32 become infinity, as in C.
_ELEMENTS: Mapping[Datatype, tuple[set[type], str]] = {
    Datatype.BOOL: ({bool}, ""),
    Datatype.BYTES: ({str}, ""),
    Datatype.FP32: (_NUMBERS, "f"),
    Datatype.FP64: (_NUMBERS, "d"),
    **{datatype: (_INTEGERS, "") for datatype in Datatype if datatype.startswith(("INT", "UINT"))},
}
#: Triton's words for values of another type; clients match on them.
_ACCESSES = {
    Datatype.BOOL: "non-boolean as boolean",
    Datatype.BYTES: "non-string as string",
    **dict.fromkeys((Datatype.FP32, Datatype.FP64), "non-number as double"),
}
_JSON_NAMES = {
    bool: "booleans",
    int: "integers",
    float: "numbers with a fraction",
    str: "strings",
    list: "arrays beside single values",
    dict: "objects",
    type(None): "null",
}


def decode(name: str, datatype: Datatype, shape: tuple[int, ...], data: Any) -> Array:
    """Decode JSON ``data``, flat or nested, to an array, without implicit conversions.

    Raises:
        InvalidArgument: The data does not fit datatype and shape; the message names the input.
    """
    elements = _ELEMENTS.get(datatype)
    if elements is None:
        raise InvalidArgument(
            f"sending {datatype} data via JSON is not supported. Please use the binary data format "
            f"for input '{name}'"
        )
    allowed, code = elements
    if type(data) is LongArray:
        return _long(name, datatype, shape, data, allowed)
    if type(data) is not list:
        raise InvalidArgument(f"Unable to parse 'data' of input '{name}': it must be an array")
    types = set(map(type, data))
    while types == _LISTS:
        data = list(itertools.chain.from_iterable(data))
        types = set(map(type, data))
    if len(data) != math.prod(shape) or not types <= allowed:
        raise _mismatch(name, datatype, shape, len(data), types - allowed)
    if datatype is Datatype.BYTES:
        try:
            return raw_tensors.object_array([text.encode() for text in data], shape)
        except UnicodeEncodeError:
            raise InvalidArgument(f"a string of input '{name}' is not valid Unicode") from None
    try:
        if not code:
            return np.array(data, NUMPY_DTYPES[datatype]).reshape(shape)
        return np.ndarray(shape, NUMPY_DTYPES[datatype], array(code, data))
    except OverflowError:
        raise InvalidArgument(f"a value of input '{name}' does not fit {datatype}") from None


def _long(
    name: str, datatype: Datatype, shape: tuple[int, ...], data: LongArray, allowed: set[type]
) -> Array:
    if data.size != math.prod(shape) or not data.types <= allowed:
        raise _mismatch(name, datatype, shape, data.size, data.types - allowed)
    try:
        return data.array(NUMPY_DTYPES[datatype]).reshape(shape)
    except OverflowError:
        raise InvalidArgument(f"a value of input '{name}' does not fit {datatype}") from None


def _mismatch(
    name: str, datatype: Datatype, shape: tuple[int, ...], given: int, wrong: set[type]
) -> InvalidArgument:
    """Make the error for a wrong number of values, or for values of ``wrong`` types."""
    count = math.prod(shape)
    if given != count:
        return InvalidArgument(
            f"unexpected number of elements for input '{name}': shape {list(shape)} needs "
            f"{count}, got {given}"
        )
    kind = "unsigned-integer" if datatype.startswith("U") else "signed-integer"
    access = _ACCESSES.get(datatype, f"non-{kind} as {kind}")
    return InvalidArgument(
        f"attempt to access JSON {access}: input '{name}' is {datatype}, but its 'data' holds "
        f"{', '.join(sorted(_JSON_NAMES[kind] for kind in wrong))}"
    )


def encode(tensor: Tensor) -> Array:
    """Return the tensor's elements as a flat array of numbers or strings.

    Raises:
        InvalidArgument: JSON cannot represent them.
    """
    if tensor.datatype in BINARY_ONLY:
        raise InvalidArgument(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data "
            f"format for output '{tensor.name}'"
        )
    data: Array = tensor.data.ravel()
    if tensor.datatype is not Datatype.BYTES:
        return data
    try:
        return converted(data, bytes.decode)
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"output '{tensor.name}' holds bytes that are not UTF-8. Please use the binary data "
            "format for it"
        ) from error


def converted(data: Array, convert: Callable[[bytes], Any]) -> Array:
    """Convert the elements of BYTES, in pieces, to JSON values."""
    flat, values = data.reshape(-1), np.empty(data.size, dtype=object)
    for start in range(0, len(flat), raw_tensors.PIECE):
        items = flat[start : start + raw_tensors.PIECE]
        values[start : start + raw_tensors.PIECE] = [convert(item) for item in items]
        offload.checkpoint()
    return values.reshape(data.shape)
