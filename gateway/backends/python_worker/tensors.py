"""Tensors of the model's side: frames ↔ ``triton_python_backend_utils.Tensor``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from triton_python_backend_utils._tensors import (
    BF16,
    DATATYPES,
    Tensor,
    deserialize_bytes_tensor,
    serialize_byte_tensor,
)

from .regions import Buffer, aligned

_DTYPES = {name: dtype for dtype, name in DATATYPES.items()} | {BF16: np.dtype("u2")}
#: Name, datatype, shape, and size in bytes.
Described = tuple[str, str, tuple[int, ...], int]


def describe(tensors: Iterable[Tensor]) -> tuple[tuple[Described, ...], list[Buffer]]:
    """The description of ``tensors`` in a frame, and their contents."""
    rows: list[Described] = []
    buffers: list[Buffer] = []
    for tensor in tensors:
        array, datatype = tensor._array, tensor._datatype
        if datatype == "BYTES":
            content: Buffer = serialize_byte_tensor(array) or b""
        elif array.nbytes <= 4096:
            content = array.tobytes()
        else:
            content = array.reshape(-1).view(np.uint8).data
        rows.append((tensor._name, datatype, array.shape, len(content)))
        buffers.append(content)
    return tuple(rows), buffers


def restore(rows: Iterable[Described], content: Any, offset: int = 0) -> tuple[list[Tensor], int]:
    """The tensors that ``rows`` describe, as views of ``content``, and the place after the last."""
    tensors = []
    for name, datatype, shape, size in rows:
        if datatype == "BYTES":
            part = memoryview(content)[offset : offset + size] if size else b""
            array = deserialize_bytes_tensor(part).reshape(shape)
        elif size:
            dtype = _DTYPES[datatype]
            array = np.frombuffer(content, dtype, math.prod(shape), offset).reshape(shape)
        else:
            array = np.empty(shape, _DTYPES[datatype])
        tensors.append(Tensor.of_datatype(name, array, datatype))
        offset += aligned(size)
    return tensors, offset
