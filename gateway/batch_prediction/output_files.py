"""Files of answers: JSON Lines and Parquet, complete or absent.

Until it is complete, a file ``OUT`` is a folder ``OUT.part`` with the rows so far, each written
whole, and what they are the answers of. A run that was killed goes on behind the last whole row.
"""

from __future__ import annotations

import abc
import contextlib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import orjson

from modelport.client_models import TensorDescription
from modelport.gateway.errors import Unavailable, UsageError
from modelport.gateway.extras import require_extra
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype

PART = ".part"
#: Rows of a group of Parquet, and their bytes.
GROUP_ROWS, GROUP_BYTES = 1 << 20, 64 << 20
_RUN, _ROWS, _COMPLETE = "run.json", "rows", "complete"
_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


class BlockAnswers(NamedTuple):
    """The answers to consecutive rows.

    Attributes:
        columns: of each output, an array of the rows, or a list with None for a row that failed;
            texts are ``str``.
        errors: why a row failed, by its number.
    """

    rows: int
    columns: Mapping[str, Array | Sequence[Array | None]]
    errors: Mapping[int, str]


class OutputFile(abc.ABC):
    """A file of answers that is being written.

    Attributes:
        done, failed: the rows that it has, and those of them that failed.
    """

    done: int
    failed: int

    @abc.abstractmethod
    def __init__(
        self, path: Path, rows: IO[bytes], outputs: Sequence[TensorDescription]
    ) -> None: ...

    @abc.abstractmethod
    def write(self, answers: BlockAnswers) -> None: ...

    @abc.abstractmethod
    def finish(self) -> None:
        """Put the file in its place."""


def check(path: Path, overwrite: bool) -> None:
    """Check what can be before a model is loaded.

    Raises:
        UsageError: the file exists, or is of no known format.
        Unsupported: pyarrow is not installed.
    """
    if path.suffix.lower() not in KINDS:
        raise UsageError(f"'{path}' has no suffix of {', '.join(KINDS)}; name such a file")
    if KINDS[path.suffix.lower()] is ParquetOutput:
        require_extra("parquet")
    if path.exists() and not overwrite:
        raise UsageError(f"'{path}' exists; name another file, or give --overwrite")


@contextlib.contextmanager
def opened(
    path: Path, outputs: Sequence[TensorDescription], run: Mapping[str, Any], overwrite: bool
) -> Iterator[OutputFile]:
    """Begin the file at ``path``, which was checked, or go on with it.

    Args:
        outputs: of the model, without the dimension of the batch.
        run: what the answers depend on; those of another run are not continued.
        overwrite: replace a complete file, and drop one of another run.

    Raises:
        UsageError: another process writes it, or it belongs to another run.
        Unavailable: the disk refuses it.
    """
    folder = path.with_name(path.name + PART)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / _ROWS, "a+b") as rows:
            _lock(rows, path)
            try:
                _check_run(folder, run, rows, overwrite)
                yield KINDS[path.suffix.lower()](path, rows, outputs)
            finally:
                if folder.exists() and not os.fstat(rows.fileno()).st_size:
                    shutil.rmtree(folder)
    except OSError as error:
        reason = str(error.strerror or error).lower()
        raise Unavailable(
            f"'{path}' cannot be written ({reason}); run the same command to go on when it can"
        ) from error


def _lock(rows: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(rows, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"another process writes '{path}'; wait for it") from error


def _check_run(folder: Path, run: Mapping[str, Any], rows: IO[bytes], overwrite: bool) -> None:
    """Compare this run with that of the rows in ``folder``, or write it down."""
    place = folder / _RUN
    try:
        before = json.loads(place.read_text())
    except (OSError, ValueError):
        before = None  # killed before it had a row
    if before != run:
        if os.fstat(rows.fileno()).st_size and not overwrite:
            kept = before if isinstance(before, dict) else {}
            changed = ", ".join(key for key in run if kept.get(key) != run[key])
            raise UsageError(
                f"'{folder}' holds rows of another run (not the same: {changed}); give its options "
                "to go on with it, --overwrite to drop it, or name another file"
            )
        rows.truncate(0)
        staged = place.with_suffix(".new")
        staged.write_text(json.dumps(run))
        staged.replace(place)


def _put(rows: Path, path: Path) -> None:
    """Move a file, whose content is on the disk then, in place of another, and drop its folder."""
    with open(rows, "rb") as file:
        os.fsync(file.fileno())
    rows.replace(path)
    shutil.rmtree(path.with_name(path.name + PART))


def error_name(outputs: Sequence[TensorDescription]) -> str:
    """The name of the column with the errors, which is no output's."""
    name, taken = "error", {each.name for each in outputs}
    while name in taken:
        name += "_"
    return name


def is_scalar(output: TensorDescription) -> bool:
    """Whether an output has one value in each row, which is written without brackets."""
    return output.shape in ((), (1,))


class JsonLinesOutput(OutputFile):
    """JSON Lines: an object of outputs by name in each line, or of the error."""

    def __init__(self, path: Path, rows: IO[bytes], outputs: Sequence[TensorDescription]) -> None:
        self._path, self._rows, self._outputs = path, rows, outputs
        self._error = error_name(outputs)
        self.done, self.failed = self._kept()

    def _kept(self) -> tuple[int, int]:
        """The numbers of whole lines, and of those with an error; what follows is cut off."""
        self._rows.seek(0)
        done = failed = end = 0
        start = f'{{"{self._error}":'.encode()
        while (line := self._rows.readline()).endswith(b"\n"):
            done, failed, end = done + 1, failed + line.startswith(start), end + len(line)
        self._rows.truncate(end)
        return done, failed

    def write(self, answers: BlockAnswers) -> None:
        lines = []
        for row in range(answers.rows):
            error = answers.errors.get(row)
            document: dict[str, Any] = {self._error: error}
            if error is None:
                document = {
                    each.name: _plain(each, answers.columns[each.name][row])
                    for each in self._outputs
                }
            lines.append(orjson.dumps(document, option=_JSON))
        self._rows.write(b"".join(lines))
        self._rows.flush()
        self.done, self.failed = self.done + answers.rows, self.failed + len(answers.errors)

    def finish(self) -> None:
        _put(Path(self._rows.name), self._path)


def _plain(output: TensorDescription, value: Any) -> Any:
    """A row of an output as JSON has it; NaN and infinities as texts, like protobuf's."""
    array = np.asarray(value)
    if output.datatype is Datatype.BYTES:
        values: Any = array.tolist()
    elif array.dtype.kind == "f" and not np.isfinite(array).all():
        shown = [
            each if math.isfinite(each) else _NOT_FINITE.get(each, "NaN")
            for each in array.ravel().tolist()
        ]
        values = np.array(shown, object).reshape(array.shape).tolist()
    else:
        return array.reshape(-1)[0] if is_scalar(output) else np.ascontiguousarray(array)
    return values if array.ndim == 0 or not is_scalar(output) else values[0]


class ParquetOutput(OutputFile):
    """Parquet: a column for each output, and one of errors.

    Rows are appended to a stream of Arrow, which is converted in the end: a file of Parquet cannot
    be continued.
    """

    def __init__(self, path: Path, rows: IO[bytes], outputs: Sequence[TensorDescription]) -> None:
        import pyarrow as pa

        self._path, self._rows, self._outputs = path, rows, outputs
        fields = [pa.field(each.name, _arrow_type(each)) for each in outputs]
        self._schema = pa.schema([*fields, pa.field(error_name(outputs), pa.string())])
        self.done, self.failed = 0, 0
        end = 0
        for batch in self._batches():
            self.done += batch.num_rows
            self.failed += batch.num_rows - batch.column(len(outputs)).null_count
            end = self._rows.tell()
        self._rows.truncate(end)

    def _batches(self) -> Iterator[Any]:
        """The whole batches."""
        import pyarrow as pa

        self._rows.seek(0)
        try:
            yield from pa.ipc.open_stream(self._rows)
        except (pa.ArrowInvalid, OSError):  # the last one is not whole, or there is none
            return

    def write(self, answers: BlockAnswers) -> None:
        import pyarrow as pa

        columns = [
            _arrow_column(answers.columns[each.name], kind)
            for each, kind in zip(self._outputs, self._schema.types, strict=False)
        ]
        errors = [answers.errors.get(row) for row in range(answers.rows)]
        batch = pa.record_batch([*columns, pa.array(errors, pa.string())], schema=self._schema)
        if not self.done:
            self._rows.write(self._schema.serialize())
        self._rows.write(batch.serialize())
        self._rows.flush()
        self.done, self.failed = self.done + answers.rows, self.failed + len(answers.errors)

    def finish(self) -> None:
        from pyarrow import parquet

        size = Path(self._rows.name).stat().st_size
        rows = max(1, min(GROUP_ROWS, GROUP_BYTES * self.done // max(1, size)))
        complete = Path(self._rows.name).with_name(_COMPLETE)
        with parquet.ParquetWriter(complete, self._schema) as writer:
            written = 0
            for batch in self._batches():
                writer.write_batch(batch, row_group_size=rows)
                written += batch.num_rows
        if written < self.done:
            raise OSError(f"{self.done - written} rows cannot be read again")
        _put(complete, self._path)


def _arrow_type(output: TensorDescription) -> Any:
    import pyarrow as pa

    if output.datatype is Datatype.BYTES:
        kind = pa.string()
    else:
        is_bf16 = output.datatype is Datatype.BF16  # float32, as the client gives it
        kind = pa.from_numpy_dtype(np.float32 if is_bf16 else NUMPY_DTYPES[output.datatype])
    for _ in range(0 if is_scalar(output) else len(output.shape)):
        kind = pa.list_(kind)
    return kind


def _arrow_column(values: Array | Sequence[Array | None], kind: Any) -> Any:
    import pyarrow as pa

    if not isinstance(values, np.ndarray):
        rows = [None if row is None else _nested(row, kind) for row in values]
        return pa.array(rows, kind)
    flat = values.reshape(-1)
    made = pa.array(flat.tolist() if flat.dtype == object else flat)
    if pa.types.is_list(kind):
        for axis in range(values.ndim - 1, 0, -1):
            count = math.prod(values.shape[:axis])
            offsets = pa.array(np.arange(count + 1) * values.shape[axis], pa.int32())
            made = pa.ListArray.from_arrays(offsets, made)
    return made


def _nested(row: Array, kind: Any) -> Any:
    import pyarrow as pa

    plain = row.tolist()
    return plain[0] if isinstance(plain, list) and not pa.types.is_list(kind) else plain


#: The suffix of a file → its kind.
KINDS: Mapping[str, type[OutputFile]] = {".parquet": ParquetOutput, ".jsonl": JsonLinesOutput}
