"""Tensors in the typed fields of OIP's gRPC messages, where they do not travel as raw bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gateway.errors import InvalidArgument
from gateway.types import NUMPY_DTYPES, Array, Datatype
from gateway.wire import raw

#: The field of ``InferTensorContents`` that carries a datatype; FP16 and BF16 are raw only.
FIELDS = {
    Datatype.BOOL: "bool_contents",
    Datatype.INT8: "int_contents",
    Datatype.INT16: "int_contents",
    Datatype.INT32: "int_contents",
    Datatype.INT64: "int64_contents",
    Datatype.UINT8: "uint_contents",
    Datatype.UINT16: "uint_contents",
    Datatype.UINT32: "uint_contents",
    Datatype.UINT64: "uint64_contents",
    Datatype.FP32: "fp32_contents",
    Datatype.FP64: "fp64_contents",
    Datatype.BYTES: "bytes_contents",
}


def decode(name: str, datatype: Datatype, shape: tuple[int, ...], contents: Any) -> Array:
    """``contents``, an ``InferTensorContents``, as an array of ``shape``.

    Raises:
        InvalidArgument: it does not hold exactly what datatype and shape need.
    """
    if datatype not in FIELDS:
        raise InvalidArgument(
            f"input '{name}' is {datatype}, which is carried by raw_input_contents only"
        )
    values: Sequence[Any] = getattr(contents, FIELDS[datatype])
    if len(values) != math.prod(shape):
        raise InvalidArgument(
            f"unexpected number of elements for input '{name}': shape {list(shape)} needs "
            f"{math.prod(shape)} in {FIELDS[datatype]}, got {len(values)}"
        )
    if datatype is Datatype.BYTES:
        return raw.object_array(list(values), shape)
    try:
        return np.array(list(values), NUMPY_DTYPES[datatype]).reshape(shape)
    except OverflowError:
        raise InvalidArgument(f"a value of input '{name}' does not fit {datatype}") from None
