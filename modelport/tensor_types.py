"""Types of a Python model's inputs and outputs: type hints, and arrays to and from their values."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from modelport.gateway.errors import Internal, InvalidArgument, UsageError
from triton_python_backend_utils._tensors import DATATYPES

_DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}
#: Types of Python values → the datatype of the tensor.
_PYTHON: Mapping[Any, str] = {
    str: "BYTES", bytes: "BYTES", bool: "BOOL", int: "INT64", float: "FP64",
}  # fmt: skip
_HINTS = 'str, bytes, int, float, bool, a list of one of them, or modelport.Array["FP32", 2]'


class TensorType(NamedTuple):
    """The type of an input or an output.

    Attributes:
        dims: without the batch's dimension; -1 is any size, and no dims are a single value, which
            is sent as a tensor of one element.
        python: the type of the values; None: they are an array.
        many: values come in a list.
    """

    datatype: str
    dims: tuple[int, ...]
    python: type | None = None
    many: bool = False

    @property
    def triton_type(self) -> str:
        """The ``data_type`` of a model configuration."""
        return f"TYPE_{'STRING' if self.datatype == 'BYTES' else self.datatype}"

    def value(self, array: Any, name: str) -> Any:
        """The value that the model gets for the array of the input ``name``.

        Raises:
            InvalidArgument: a text is not UTF-8.
        """
        if self.python is None:
            return array
        values: list[Any] = array.reshape(-1).tolist()
        if self.python is str:
            try:
                values = [each.decode() for each in values]
            except UnicodeDecodeError as error:
                raise InvalidArgument(f"input '{name}' is not UTF-8") from error
        return values if self.many else values[0]

    def array(self, value: Any, name: str, rows: int | None) -> Any:
        """The array of what the model returns as the output ``name``.

        Args:
            rows: the size of the batch; None: the model has none.

        Raises:
            Internal: the value has another type or shape.
        """
        found = self._texts(value, name) if self.datatype == "BYTES" else self._numbers(value, name)
        if rows is not None and found.shape[:1] != (rows,):
            count = f"{len(found)} items" if found.ndim else "a single value"
            raise Internal(
                f"output '{name}' must have {rows} items, one for each of the batch, but the model "
                f"returns {count}"
            )
        dims = found.shape if rows is None else found.shape[1:]
        if len(dims) != len(self.dims) or any(
            wanted not in (-1, size) for wanted, size in zip(self.dims, dims, strict=True)
        ):
            raise Internal(
                f"output '{name}' must have dims {_shown(self.dims)}, but the model returns "
                f"{_shown(dims)}"
            )
        return found

    def _texts(self, value: Any, name: str) -> Any:
        found = np.array(value, object)
        for item in found.flat:
            if not isinstance(item, str | bytes):
                raise Internal(
                    f"output '{name}' must be BYTES, of str or bytes, but the model returns "
                    f"{_kind(item)}"
                )
        return found

    def _numbers(self, value: Any, name: str) -> Any:
        """The array of ``value``: numbers of Python fit any precision, an array has to."""
        dtype = _DTYPES[self.datatype]
        plain = isinstance(value, list | tuple | int | float)
        try:
            found = np.asarray(value)
            if not found.size or np.can_cast(found.dtype, dtype, "same_kind" if plain else "safe"):
                return np.asarray(value, dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise Internal(f"output '{name}' is not {self.datatype}: {error}") from error
        given, remedy = _kind(value), ""
        if isinstance(value, np.ndarray) or found.dtype != object:
            given = DATATYPES.get(found.dtype, given)
            remedy = "" if plain else f"; convert it with .astype(numpy.{dtype})"
        raise Internal(
            f"output '{name}' must be {self.datatype}, but the model returns {given}{remedy}"
        )


def _kind(value: object) -> str:
    return type(value).__name__


def _shown(dims: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"


class _Subscripted(type):
    """The type of ``Array``: subscripts make tensor types."""

    def __getitem__(cls, item: Any) -> TensorType:
        datatype, *dims = item if isinstance(item, tuple) else (item,)
        if datatype not in _DTYPES:
            try:
                datatype = DATATYPES[np.dtype(datatype)]
            except (TypeError, KeyError):
                raise UsageError(
                    f"Array[{item!r}]: there is no datatype {datatype!r}; name one of "
                    f"{', '.join(_DTYPES)}"
                ) from None
        for dim in dims:
            if type(dim) is not int or (dim < 1 and dim != -1):
                raise UsageError(
                    f"Array[{item!r}]: a dim is a number above 0, or -1 for any size, not {dim!r}"
                )
        return TensorType(datatype, tuple(dims))


class Array(metaclass=_Subscripted):
    """A numpy array as the type hint of an input or an output.

        def score(pixels: modelport.Array["FP32", 3, -1, -1]) -> modelport.Array["FP32", 10]: ...

    The subscripts are the datatype (``BOOL``, ``INT64``, ``FP32``, ``BYTES`` …, or a type of numpy)
    and the dims without the batch's, -1 for any size. No dims are one number for each item of the
    batch. For type checkers, write ``Annotated[np.ndarray, modelport.Array["FP32", 2]]``.
    """


def tensor_type(hint: Any, batched: bool, place: str) -> TensorType:
    """The type that ``hint`` stands for.

    Args:
        place: the name of the input or output, in the text of an error.

    Raises:
        UsageError: it stands for no tensor.
    """
    if isinstance(hint, TensorType):
        return hint
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        given = [each for each in arguments if isinstance(each, TensorType)]
        return given[0] if given else tensor_type(arguments[0], batched, place)
    if origin in (typing.Union, types.UnionType):
        others = [each for each in arguments if each is not type(None)]
        if len(others) == 1:
            return tensor_type(others[0], batched, place)
    python = arguments[0] if origin is list else hint
    if not isinstance(python, type) or python not in _PYTHON:
        shown = hint.__name__ if isinstance(hint, type) and origin is None else hint
        raise UsageError(f"{place} has the type hint {shown}, which is not one of {_HINTS}")
    if batched and origin is not list:
        raise UsageError(
            f"{place} has the type hint {python.__name__}; with 'batch', the model gets the values "
            f"of many requests: write list[{python.__name__}]"
        )
    many = origin is list
    return TensorType(_PYTHON[python], (-1,) if many and not batched else (), python, many)
