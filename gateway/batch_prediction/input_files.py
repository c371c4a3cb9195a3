"""Readers of files of rows: Parquet, CSV, JSON Lines and NumPy's, each a block at a time."""

from __future__ import annotations

import abc
import contextlib
import csv
import io
import itertools
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.extras import naming_extras
from modelport.gateway.repository import untrusted_files
from modelport.gateway.types import Array

if TYPE_CHECKING:
    import pyarrow

#: Rows and bytes of a block.
MOST_ROWS, MOST_BLOCK_BYTES = 4096, 16 << 20
#: The size of a line of JSON Lines, and of a row of an array.
MOST_LINE_BYTES = 64 << 20
#: Bytes of a column that Parquet's reader holds.
BUFFER_BYTES = 1 << 20


class RowBlock(NamedTuple):
    """Consecutive rows of a file.

    Attributes:
        columns: by name, an array of the rows; among objects, None is a missing value.
        errors: why a row cannot be read, by its number in the block.
        position: how much of the file is read, of ``InputFile.size``.
    """

    rows: int
    columns: Mapping[str, Array]
    errors: Mapping[int, str]
    position: int


class InputFile(abc.ABC):
    """A file of rows.

    Attributes:
        name: its path.
        columns: their names; None: each row has its own.
        size: of the file, in rows or bytes.
        has_types: whether a column has one type and shape in all rows.
        is_text: whether values are texts that stand for numbers and lists.
    """

    name: str
    columns: Sequence[str] | None
    size: int
    has_types: bool
    is_text: bool

    @abc.abstractmethod
    def __init__(self, stream: IO[bytes]) -> None: ...

    @abc.abstractmethod
    def blocks(self, wanted: Sequence[str], skipped: int, most: int) -> Iterator[RowBlock]:
        """The rows after the first ``skipped``, with the ``wanted`` columns.

        Args:
            most: rows of a block.
        """


@contextlib.contextmanager
def opened(path: Path) -> Iterator[InputFile]:
    """Open a file by its suffix; errors of reading it are raised in the block as well.

    Raises:
        InvalidArgument: it cannot be read.
    """
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise InvalidArgument(
            f"'{path}' has no suffix of {', '.join(_KINDS)}; give a file of one of these formats"
        )
    try:
        with naming_extras(), untrusted_files.open_file(path) as stream:
            file = kind(stream)
            file.name = str(path)
            yield file
    except _Unreadable as error:
        raise InvalidArgument(f"'{path}' cannot be read: {error}") from error


class _Unreadable(Exception):
    """A file is damaged, or has another form."""


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Translate the errors of libraries; those of the block's consumer are not among them."""
    try:
        yield
    except (
        *(OSError, ValueError, EOFError, MemoryError, zlib.error, zipfile.BadZipFile),
        *(csv.Error, NotImplementedError, RuntimeError),
    ) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise _Unreadable(" ".join(reason.split())[:300]) from error


def _read(blocks: Iterator[RowBlock]) -> Iterator[RowBlock]:
    while True:
        with _reading():
            block = next(blocks, None)
        if block is None:
            return
        yield block


def rows_of(row_bytes: float, most: int) -> int:
    """The rows of a block, at most ``most``."""
    return int(max(1, min(most, MOST_ROWS, MOST_BLOCK_BYTES // max(1, row_bytes))))


class ParquetInput(InputFile):
    """Parquet, read by pyarrow."""

    has_types, is_text = True, False

    def __init__(self, stream: IO[bytes]) -> None:
        from pyarrow import parquet

        with _reading():
            self._file = parquet.ParquetFile(stream, buffer_size=BUFFER_BYTES)
            self._groups = self._file.metadata
            self.schema = self._file.schema_arrow
        self.columns: Sequence[str] = self.schema.names
        self.size = self._groups.num_rows

    def blocks(self, wanted: Sequence[str], skipped: int, most: int) -> Iterator[RowBlock]:
        return _read(self._blocks(wanted, skipped, most))

    def _blocks(self, wanted: Sequence[str], skipped: int, most: int) -> Iterator[RowBlock]:
        position = 0
        for number in range(self._groups.num_row_groups):
            group = self._groups.row_group(number)
            if position + group.num_rows <= skipped:
                position += group.num_rows
                continue
            rows = rows_of(group.total_byte_size / max(1, group.num_rows), most)
            for batch in self._file.iter_batches(rows, [number], [*wanted], use_threads=False):
                position += batch.num_rows
                count = min(batch.num_rows, position - skipped)
                if count > 0:
                    batch = batch.slice(batch.num_rows - count)
                    columns = {name: _of_arrow(batch.column(name)) for name in wanted}
                    yield RowBlock(count, columns, {}, position)


def _of_arrow(column: pyarrow.Array) -> Array:
    """The rows of a column: one array if all have the same shape, else objects."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    shape, values = [len(column)], column
    while (
        pa.types.is_list(values.type)
        or pa.types.is_large_list(values.type)
        or (pa.types.is_fixed_size_list(values.type))
    ):
        lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
        if values.null_count or len(lengths) != 1:
            return _objects(column.to_pylist())
        shape.append(int(lengths[0]))
        values = values.flatten()
    if pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    if values.null_count:
        return _objects(column.to_pylist())
    found: Array = values.to_numpy(zero_copy_only=False)
    return found.reshape(shape)


def _objects(values: Sequence[Any]) -> Array:
    made: Array = np.empty(len(values), object)
    made[:] = values
    return made


class _LinesInput(InputFile):
    """A file of texts, a row each; the position is that of its bytes."""

    has_types = False

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.size = os.fstat(stream.fileno()).st_size

    def _blocks(
        self, rows: Iterator[tuple[Mapping[str, Any] | str, int]], skipped: int, most: int
    ) -> Iterator[RowBlock]:
        """Blocks of rows, each with its size; a text is an error."""
        held: list[Mapping[str, Any] | str] = []
        size = 0
        for row, row_size in itertools.chain(itertools.islice(rows, skipped, None), [("", -1)]):
            is_end = row_size < 0
            if held and (is_end or len(held) == most or size + row_size > MOST_BLOCK_BYTES):
                yield self._block(held)
                held, size = [], 0
            if not is_end:
                held.append(row)
                size += row_size

    def _block(self, rows: Sequence[Mapping[str, Any] | str]) -> RowBlock:
        errors = {at: row for at, row in enumerate(rows) if isinstance(row, str)}
        read = [{} if isinstance(row, str) else row for row in rows]
        names = {name: None for row in read for name in row}
        columns = {name: _objects([row.get(name) for row in read]) for name in names}
        return RowBlock(len(rows), columns, errors, self._stream.tell())


class CsvInput(_LinesInput):
    """CSV (RFC 4180) whose first row has the names; an empty field is a missing value."""

    is_text = True

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        with _reading():
            self._lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
            self._reader = csv.reader(self._lines, strict=True)
            self.columns: Sequence[str] = next(self._reader, [])
            if not self.columns:
                raise ValueError("it is empty; its first row has the names of the columns")
            if len({*self.columns}) < len(self.columns):
                raise ValueError("two columns have the same name")

    def blocks(self, wanted: Sequence[str], skipped: int, most: int) -> Iterator[RowBlock]:
        return _read(self._blocks(self._rows(wanted), skipped, most))

    def _rows(self, wanted: Sequence[str]) -> Iterator[tuple[Mapping[str, Any] | str, int]]:
        places = [(name, self.columns.index(name)) for name in wanted]
        for cells in self._reader:
            if not cells:
                continue  # an empty line
            if len(cells) != len(self.columns):
                yield f"it has {len(cells)} fields, and the header {len(self.columns)}", 0
                continue
            row = {name: cells[place] or None for name, place in places}
            yield row, sum(map(len, cells))


class JsonLinesInput(_LinesInput):
    """JSON Lines: a row is an object of values by name, or a request of the protocol."""

    columns, is_text = None, False

    def blocks(self, wanted: Sequence[str], skipped: int, most: int) -> Iterator[RowBlock]:
        return _read(self._blocks(self._rows(wanted), skipped, most))

    def _rows(self, wanted: Sequence[str]) -> Iterator[tuple[Mapping[str, Any] | str, int]]:
        while line := self._stream.readline(MOST_LINE_BYTES + 1):
            if len(line) > MOST_LINE_BYTES:
                raise ValueError(f"a line is longer than {MOST_LINE_BYTES} bytes")
            if line.isspace():
                continue
            try:
                yield _row(_document(line), wanted), len(line)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                said = f"no {error}" if isinstance(error, KeyError) else str(error)
                yield f"it is not a row: {said[:200]}", len(line)


def _document(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line)  # takes NaN and infinities, too


def _row(document: Any, wanted: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise TypeError("not an object of values by name")
    listed = document.get("inputs")
    if not isinstance(listed, list) or "inputs" in wanted:
        return {name: document[name] for name in wanted if name in document}
    row = {}
    for tensor in listed:  # a request of the Open Inference Protocol
        values = np.array(tensor["data"], None if tensor["datatype"] != "BYTES" else object)
        shape = [int(size) for size in tensor["shape"]]
        if shape[:1] != [1]:
            raise ValueError(f"a request of the shape {shape}; a line has one row, as [1, ...]")
        row[str(tensor["name"])] = values.reshape(shape[1:])
    return row


class NpyInput(InputFile):
    """Arrays of rows: an ``.npy`` has one, without a name."""

    has_types, is_text = True, False

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.columns: Sequence[str] = [""]
        with _reading():
            self._opened = {name: self._open(name) for name in self._names()}
        counts = {array.rows for array in self._opened.values()}
        if len(counts) != 1:
            raise _Unreadable("its arrays have different numbers of rows, or there are none")
        self.columns, self.size = [*self._opened], counts.pop()

    def _names(self) -> Sequence[str]:
        return [""]

    def _open(self, name: str) -> _ArrayStream:
        self._stream.seek(0)
        return _ArrayStream(self._stream)

    def blocks(self, wanted: Sequence[str], skipped: int, most: int) -> Iterator[RowBlock]:
        return _read(self._blocks(wanted, skipped, most))

    def _blocks(self, wanted: Sequence[str], skipped: int, most: int) -> Iterator[RowBlock]:
        arrays = {name: self._opened[name] for name in wanted}
        for array in arrays.values():
            array.skip(skipped)
        most = rows_of(sum(array.row_bytes for array in arrays.values()), most)
        for begin in range(skipped, self.size, most):
            count = min(most, self.size - begin)
            columns = {name: array.read(count) for name, array in arrays.items()}
            yield RowBlock(count, columns, {}, begin + count)


class NpzInput(NpyInput):
    """Arrays of rows by name, in an ``.npz``; each is read by itself."""

    def _names(self) -> Sequence[str]:
        self._archive = zipfile.ZipFile(self._stream)
        return [name.removesuffix(".npy") for name in self._archive.namelist()]

    def _open(self, name: str) -> _ArrayStream:
        return _ArrayStream(self._archive.open(f"{name}.npy"))


class _ArrayStream:
    """An array in NumPy's format, whose rows are read in their order."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        version = np.lib.format.read_magic(stream)
        header = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            header = np.lib.format.read_array_header_2_0
        shape, is_fortran, self._dtype = header(stream)
        if self._dtype.hasobject:
            raise ValueError("an array of Python objects; save texts as an array of 'U' or 'S'")
        if not shape or min(shape) < 0 or (is_fortran and len(shape) > 1):
            raise ValueError("an array without rows, or by columns; save numpy.ascontiguousarray")
        self.rows, self._row_shape = shape[0], shape[1:]
        self.row_bytes = self._dtype.itemsize * math.prod(self._row_shape)
        if self.row_bytes > MOST_LINE_BYTES:
            raise ValueError(f"an array whose rows have more than {MOST_LINE_BYTES} bytes")

    def skip(self, rows: int) -> None:
        self._stream.seek(rows * self.row_bytes, os.SEEK_CUR)

    def read(self, rows: int) -> Array:
        content = self._stream.read(rows * self.row_bytes)
        if len(content) < rows * self.row_bytes:
            raise EOFError("it is shorter than its header says")
        return np.frombuffer(content, self._dtype).reshape(rows, *self._row_shape)


_KINDS: Mapping[str, type[InputFile]] = {
    ".parquet": ParquetInput,
    ".jsonl": JsonLinesInput,
    ".csv": CsvInput,
    ".npz": NpzInput,
    ".npy": NpyInput,
}


def value_of(text: str, is_bytes: bool) -> Any:
    """The value of a field of CSV: a list in JSON, a number or a text.

    Raises:
        ValueError: it is none.
    """
    if text.startswith("["):
        return json.loads(text)
    if is_bytes:
        return text
    folded = text.strip().lower()
    if folded in ("true", "false"):
        return folded == "true"
    try:
        return int(folded)
    except ValueError:
        number = float(folded)
    if math.isinf(number) and "inf" not in folded:
        raise ValueError(f"{text.strip()} is too large for a number")
    return number
