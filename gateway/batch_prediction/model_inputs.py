"""Requests of the rows of a file: columns as the inputs that a model declares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from modelport.client_models import TensorDescription, as_datatype
from modelport.gateway.batch_prediction.input_files import InputFile, RowBlock, value_of
from modelport.gateway.batch_prediction.output_files import is_scalar
from modelport.gateway.errors import UsageError
from modelport.gateway.types import Array, Datatype, dims_text, fits

#: The size of a request's tensors.
MOST_REQUEST_BYTES = 8 << 20


class ModelInput(NamedTuple):
    """An input, without the dimension of the batch, and the columns that it is made of."""

    tensor: TensorDescription
    columns: tuple[str, ...]
    optional: bool

    def __str__(self) -> str:
        return f"input '{self.tensor.name}', {self.tensor.datatype} {dims_text(self.tensor.shape)}"


class RowsRequest(NamedTuple):
    """A request for some rows of a block."""

    rows: Sequence[int]
    inputs: Mapping[str, Array]

    def halves(self) -> tuple[RowsRequest, RowsRequest]:
        middle = len(self.rows) // 2
        return self._part(slice(middle)), self._part(slice(middle, None))

    def _part(self, rows: slice) -> RowsRequest:
        return RowsRequest(
            self.rows[rows], {name: array[rows] for name, array in self.inputs.items()}
        )


def inputs_of(
    file: InputFile,
    tensors: Sequence[TensorDescription],
    optional: frozenset[str],
    named: Mapping[str, Sequence[str]],
) -> list[ModelInput]:
    """The inputs of a model, with their columns.

    Args:
        tensors: its inputs, without the dimension of the batch.
        named: columns by input; others have the input's name.

    Raises:
        UsageError: a column is missing.
    """
    known = [each.name for each in tensors]
    for name in named:
        if name not in known:
            raise UsageError(f"--column {name}: the model's inputs are {', '.join(known)}")
    made = []
    for tensor in tensors:
        columns = tuple(named.get(tensor.name, (tensor.name,)))
        if file.columns == [""]:  # an array without a name
            if len(tensors) > 1:
                raise UsageError(
                    f"'{file.name}' has one array, and the model the inputs {', '.join(known)}; "
                    "give an .npz with an array for each"
                )
            columns = ("",)
        known_columns = columns if file.columns is None else file.columns
        missing = [each for each in columns if each not in known_columns]
        is_optional = tensor.name in optional and tensor.name not in named
        if missing and is_optional:
            continue
        if missing:
            shown = ", ".join(f"'{each}'" for each in [*(file.columns or ())][:20])
            raise UsageError(
                f"'{file.name}' has no column '{missing[0]}' for the input '{tensor.name}'; it has "
                f"{shown}; name its columns: --column {tensor.name}=COLUMN[,COLUMN...]"
            )
        made.append(ModelInput(tensor, columns, is_optional))
    return made


class RequestMaker:
    """Makes the requests of blocks.

    Args:
        batch_size: rows of a request; 0: the model takes single rows, without a batch.
    """

    def __init__(self, file: InputFile, inputs: Sequence[ModelInput], batch_size: int) -> None:
        self._inputs, self._batch_size = inputs, batch_size
        self._is_text, self._file = file.is_text, file.name
        #: Whether the type of a column is still unchecked: in the first block it is the file's.
        self._checks_types = file.has_types

    def requests(self, block: RowBlock) -> tuple[list[RowsRequest], dict[int, str]]:
        """The requests of a block, and why rows have none.

        Raises:
            UsageError: a column has another type or shape than its input.
        """
        errors = dict(block.errors)
        #: Rows and their inputs, by the shapes of those.
        found: dict[Any, list[tuple[int, dict[str, Array]]]] = {}
        whole: dict[str, Array] | None = None
        if not errors:
            try:
                whole = self._arrays(block, self._checks_types)
            except (TypeError, ValueError, ArithmeticError):
                whole = None
        self._checks_types = False
        if whole is not None:
            return [*self._cut(range(block.rows), whole)], errors
        for row in range(block.rows):
            if row in errors:
                continue
            columns = {name: values[row : row + 1] for name, values in block.columns.items()}
            try:
                arrays = self._arrays(RowBlock(1, columns, {}, 0), False)
            except (TypeError, ValueError, ArithmeticError) as error:
                errors[row] = " ".join(str(error).split())
                continue
            shapes = tuple((name, array.shape) for name, array in arrays.items())
            found.setdefault(shapes, []).append((row, arrays))
        made: list[RowsRequest] = []
        for rows in found.values():
            joined = {
                name: np.concatenate([arrays[name] for _, arrays in rows]) for name in rows[0][1]
            }
            made += self._cut([row for row, _ in rows], joined)
        return made, errors

    def _cut(self, rows: Sequence[int], arrays: Mapping[str, Array]) -> Iterator[RowsRequest]:
        """Requests that are neither too large nor have too many rows."""
        size = sum(array.nbytes for array in arrays.values()) // max(1, len(rows))
        most = max(1, min(self._batch_size, MOST_REQUEST_BYTES // max(1, size)))
        for begin in range(0, len(rows), most):
            part = slice(begin, begin + most)
            yield RowsRequest(rows[part], {name: array[part] for name, array in arrays.items()})

    def _arrays(self, block: RowBlock, checks_types: bool) -> dict[str, Array]:
        """The inputs of a block whose rows have one shape.

        Raises:
            TypeError, ValueError, ArithmeticError: a value does not fit, or is missing.
            UsageError: with ``checks_types``, no row of a column can fit.
        """
        made = {}
        for each in self._inputs:
            parts = [block.columns.get(name) for name in each.columns]
            found = [part for part in parts if part is not None and not _lacks(part)]
            if len(found) < len(parts):
                if each.optional and not found and block.rows == 1:
                    continue
                raise ValueError(f"{each} has no value")
            try:
                made[each.tensor.name] = self._array(each.tensor, found)
            except (TypeError, ValueError, ArithmeticError) as error:
                shown = ", ".join(f"'{name}'" for name in each.columns if name)
                reason = str(error)
                if checks_types and all(part.dtype != object for part in found):
                    raise UsageError(
                        f"column {shown} of '{self._file}' does not fit {each}: {reason}; convert "
                        f"it, or name others: --column {each.tensor.name}=COLUMN[,COLUMN...]"
                    ) from error
                raise ValueError(f"{each}: {reason}") from error
        return made

    def _array(self, tensor: TensorDescription, parts: Sequence[Array]) -> Array:
        read = [self._values(part, tensor) for part in parts]
        joined = read[0] if len(read) == 1 else np.stack(read, axis=1)
        array = as_datatype(joined, tensor.datatype)
        if tensor.datatype is Datatype.BYTES:
            wrong = [each for each in array.flat if not isinstance(each, bytes)]
            if wrong:
                raise TypeError(f"{str(wrong[0])[:40]!r} is not a text")
        shape = array.shape[1:]
        if fits(shape, tensor.shape):
            return array
        free = sum(size == -1 for size in tensor.shape)
        size, fixed = math.prod(shape), abs(math.prod(tensor.shape))
        if len(shape) > 1 or free > 1 or not fixed or size % fixed or (not free and size != fixed):
            raise ValueError(f"the shape is {dims_text(shape)}")
        return array.reshape(len(array), *tensor.shape)  # a number, or a flat list

    def _values(self, part: Array, tensor: TensorDescription) -> Array:
        """The values of a column as an array of numbers, or of texts."""
        if part.dtype != object:
            return part
        values = part.tolist()
        is_bytes = tensor.datatype is Datatype.BYTES
        if self._is_text and not (is_bytes and is_scalar(tensor)):
            values = [value_of(each, is_bytes) for each in values]
        made: Array = np.array(values, object if is_bytes else None)
        if made.dtype.kind in "OUS" and not is_bytes:
            raise TypeError(f"{str(values[0])[:40]!r} is not a number")
        return made


def _lacks(part: Array) -> bool:
    return part.dtype == object and any(value is None for value in part)


def columns_of(given: Sequence[str]) -> dict[str, list[str]]:
    """The columns by input, of ``--column INPUT=COLUMN[,COLUMN...]``.

    Raises:
        UsageError: one is another text.
    """
    found: dict[str, list[str]] = {}
    for text in given:
        name, separator, columns = text.partition("=")
        names = [each.strip() for each in columns.split(",")]
        if not separator or not name or not all(names) or name in found:
            raise UsageError(
                f"--column '{text}' is not INPUT=COLUMN[,COLUMN...], once for each input"
            )
        found[name] = names
    return found
