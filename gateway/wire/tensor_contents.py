"""Tensors in the typed fields of ``InferTensorContents``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import offload, request_memory
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype
from modelport.gateway.wire import raw_tensors, repeated_values
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from modelport.gateway.wire.raw_tensors import Buffer

#: The field of each datatype; FP16 and BF16 are carried by ``raw_input_contents`` only.
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

#: Elements between two checkpoints.
_PIECE = 8192


def decode(name: str, datatype: Datatype, shape: tuple[int, ...], contents: Any) -> Array:
    """Decode an ``InferTensorContents`` message to an array of ``shape``.

    Raises:
        InvalidArgument: The number or the range of its values does not fit datatype and shape.
    """
    if datatype not in FIELDS:
        raise _raw_only(name, datatype)
    values: Sequence[Any] = getattr(contents, FIELDS[datatype])
    if len(values) != math.prod(shape):
        raise _other_count(name, shape, FIELDS[datatype], str(len(values)))
    if datatype is Datatype.BYTES:
        return raw_tensors.object_array(list(values), shape)
    dtype = NUMPY_DTYPES[datatype]
    try:
        if len(values) <= _PIECE:
            return np.array(list(values), dtype).reshape(shape)
        array = np.empty(len(values), dtype)
        for start in range(0, len(values), _PIECE):
            array[start : start + _PIECE] = values[start : start + _PIECE]
            offload.checkpoint()
        return array.reshape(shape)
    except OverflowError:
        raise InvalidArgument(f"a value of input '{name}' does not fit {datatype}") from None


def decode_bytes(name: str, datatype: Datatype, shape: tuple[int, ...], content: Buffer) -> Array:
    """Decode a long ``InferTensorContents`` from its bytes.

    Raises:
        InvalidArgument: As ``decode``, or ``content`` is not a valid message.
    """
    field, count, given = FIELDS.get(datatype), math.prod(shape), 0
    if field is None:
        raise _raw_only(name, datatype)
    if count > len(content):  # an element takes at least one byte
        raise _other_count(name, shape, field, "fewer")
    dtype = NUMPY_DTYPES[datatype]
    request_memory.reserve(
        count * (raw_tensors.STRING_BYTES if datatype is Datatype.BYTES else dtype.itemsize)
    )
    array = np.empty(count, dtype)
    try:
        for values in repeated_values.pieces(pb.InferTensorContents, field, memoryview(content)):
            given += len(values)
            if given > count:
                break
            array[given - len(values) : given] = values
    except DecodeError as error:
        raise InvalidArgument(f"the contents of input '{name}' are not a valid message") from error
    except OverflowError:
        raise InvalidArgument(f"a value of input '{name}' does not fit {datatype}") from None
    if given != count:
        raise _other_count(name, shape, field, str(given) if given < count else "more")
    return array.reshape(shape)


def _raw_only(name: str, datatype: Datatype) -> InvalidArgument:
    return InvalidArgument(
        f"input '{name}' is {datatype}, which is carried by raw_input_contents only"
    )


def _other_count(name: str, shape: tuple[int, ...], field: str, given: str) -> InvalidArgument:
    return InvalidArgument(
        f"unexpected number of elements for input '{name}': shape {list(shape)} needs "
        f"{math.prod(shape)} in {field}, got {given}"
    )
