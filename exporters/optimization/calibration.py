"""Calibration data: inputs from which static quantisation takes the ranges of activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnxruntime.quantization import CalibrationDataReader

from modelport.exporters.loaded_model import Origin, Source
from modelport.exporters.requests import input_files
from modelport.gateway.errors import UsageError
from modelport.gateway.recording import record_reader
from modelport.gateway.types import Array, TensorSpec

FLAG = "--calibrate"
#: Fewer rows say little about the ranges of activations.
FEWEST_ROWS = 8
#: More say nothing new, and calibrators keep the activations of all.
MOST_ROWS = 1 << 14
#: Requests of recorded traffic that are used, chosen at random.
MOST_RECORDED = 256
#: Rows per batch, unless the model's largest batch is smaller.
BATCH = 8


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationData:
    """Batches of inputs in the model's shapes, and the files that they were read from."""

    origins: tuple[Origin, ...]
    batches: tuple[Mapping[str, Array], ...]
    rows: int


def read(paths: Sequence[Path], source: Source) -> CalibrationData:
    """Read calibration data and check it against the signature.

    Raises:
        UsageError: a file cannot be read, an input does not fit or is not finite, or there are
            too few rows or too many.
    """
    batches = [batch for path in paths for batch in _read(path, source)]
    batched = source.signature.max_batch_size > 0
    rows = sum(len(next(iter(batch.values()))) if batched else 1 for batch in batches)
    if rows < FEWEST_ROWS:
        raise UsageError(
            f"{FLAG} {' '.join(map(str, paths))}: {rows} rows of inputs are too few to find the "
            f"ranges of activations; give {FEWEST_ROWS} or more, a hundred or so"
        )
    if rows > MOST_ROWS:
        raise UsageError(
            f"{FLAG} {' '.join(map(str, paths))}: {rows} rows of inputs are more than {MOST_ROWS}; "
            "give a hundred or so"
        )
    return CalibrationData(
        tuple(Origin(path.name, input_files.digest(path)) for path in paths), tuple(batches), rows
    )


def _read(path: Path, source: Source) -> list[dict[str, Array]]:
    signature = source.signature
    if record_reader.is_records(path):
        found = input_files.recorded(path, signature, FLAG, MOST_RECORDED)
    elif path.suffix in (".json", ".jsonl"):
        found = list(input_files.read_requests(path, signature, FLAG))
    else:
        if not signature.max_batch_size:
            raise UsageError(
                f"{FLAG} '{path}' has rows, and '{source.spec.name}' takes no batches; give its "
                "requests as .jsonl"
            )
        arrays = input_files.read_arrays(path, FLAG)
        inputs = input_files.choose(arrays, signature, f"{FLAG} '{path}'")
        counts = {name: len(array) for name, array in inputs.items()}
        if len(set(counts.values())) != 1:
            raise UsageError(f"{FLAG} '{path}': the numbers of rows differ: {counts}")
        found = _cut(inputs, min(BATCH, signature.max_batch_size))
    for batch in found:
        for spec in signature.inputs:
            _check_values(spec, batch[spec.name], f"{FLAG} '{path}': '{spec.name}'")
    return found


def _check_values(spec: TensorSpec, array: Array, where: str) -> None:
    if not array.size:
        raise UsageError(f"{where} is empty, {list(array.shape)}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise UsageError(f"{where} has values that are not finite; remove them")
    low = -np.inf if spec.minimum is None else spec.minimum
    high = spec.maximum if isinstance(spec.maximum, int | float) else np.inf
    if array.min() < low or array.max() > high:
        raise UsageError(
            f"{where} has values from {array.min()} to {array.max()}, the signature says "
            f"{low:g} to {high:g}"
        )


def _cut(inputs: Mapping[str, Array], size: int) -> list[dict[str, Array]]:
    rows = len(next(iter(inputs.values())))
    return [
        {name: array[start : start + size] for name, array in inputs.items()}
        for start in range(0, rows, size)
    ]


class BatchReader(CalibrationDataReader):  # type: ignore[misc]  # it has no type information
    """Calibration data in the form that ONNX Runtime's calibrators ask for it."""

    def __init__(self, data: CalibrationData) -> None:
        self._batches = data.batches
        self.set_range(0, len(self._batches))

    def __len__(self) -> int:
        return len(self._batches)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Continue with the batches from ``start_index`` to before ``end_index``."""
        self._next, self._end = start_index, end_index

    def get_next(self) -> Mapping[str, Array] | None:
        """The next batch; None at the end."""
        if self._next >= self._end:
            return None
        self._next += 1
        return self._batches[self._next - 1]
