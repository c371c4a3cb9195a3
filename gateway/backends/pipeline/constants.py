"""Constants of ``pipeline.toml`` as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, dims_text, fits

#: Elements of a constant that fills a tensor.
MAX_ELEMENTS = 2**16
_NAMES: dict[type, str] = {bool: "booleans", int: "integers", float: "floats", str: "strings"}


def accepts(datatype: Datatype, kind: type) -> bool:
    """Whether a tensor of ``datatype`` may have, or be compared with, TOML values of ``kind``."""
    if datatype is Datatype.BF16:
        return False  # numpy has no such numbers
    if datatype in (Datatype.BOOL, Datatype.BYTES):
        return kind is (bool if datatype is Datatype.BOOL else str)
    return kind is int or (kind is float and datatype.startswith("FP"))


def constant(value: Any, datatype: Datatype, dims: Sequence[int]) -> Array:
    """The tensor of ``value``. A single number or text fills it; dynamic dims then have size 1.

    Raises:
        ValueError: the value does not fit; the message says why.
    """
    shape, flat = _flattened(value)
    if not isinstance(value, list):
        shape = tuple(1 if size == -1 else size for size in dims)
        if math.prod(shape) > MAX_ELEMENTS:
            raise ValueError(f"fills more than {MAX_ELEMENTS} elements of {dims_text(dims)}")
        flat *= math.prod(shape)
    if not fits(shape, dims):
        raise ValueError(f"has shape {dims_text(shape)}, and {dims_text(dims)} is needed")
    wrong = next((type(each) for each in flat if not accepts(datatype, type(each))), None)
    if wrong is not None:
        given = _NAMES.get(wrong, "dates or tables")
        raise ValueError(f"has {given}, and the tensor is {datatype}")
    if datatype is Datatype.BYTES:
        texts = np.empty(len(flat), NUMPY_DTYPES[datatype])
        texts[:] = [each.encode() for each in flat]
        return texts.reshape(shape)
    try:
        with np.errstate(over="raise"):
            return np.array(flat, NUMPY_DTYPES[datatype]).reshape(shape)
    except (OverflowError, FloatingPointError):
        raise ValueError(f"has a number that does not fit {datatype}") from None


def _flattened(value: Any) -> tuple[tuple[int, ...], list[Any]]:
    """The shape of nested lists, and their elements in a row."""
    shape, flat = [], [value]
    while any(isinstance(each, list) for each in flat):
        sizes = {len(each) if isinstance(each, list) else -1 for each in flat}
        if len(sizes) != 1:
            raise ValueError("has lists of different lengths")
        shape.append(sizes.pop())
        flat = [each for row in flat for each in row]
    return tuple(shape), flat
