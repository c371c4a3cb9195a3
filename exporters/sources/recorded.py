"""Recorded answers of a model, ``.npz``: each input and output by name, one row per sample."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from modelport.exporters.loaded_model import Framework, Origin, Source
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.requests import input_files
from modelport.exporters.sources import SourceRequest
from modelport.gateway.errors import UsageError
from modelport.gateway.repository.manifest import sha256_of
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, ModelSignature, TensorSpec

_DATATYPES = {
    dtype: datatype
    for datatype, dtype in NUMPY_DTYPES.items()
    if datatype not in (Datatype.BF16, Datatype.BYTES)
}


def load(request: SourceRequest) -> Source:
    """Read recorded answers; ``request.output_names`` tells outputs from inputs.

    Raises:
        UsageError: the file cannot be read, or its rows do not fit together.
    """
    path = request.checkpoint
    if request.model is not None or request.model_kwargs or request.inputs:
        raise UsageError(f"'{path}' holds recorded outputs and no model; omit --model and --input")
    arrays = _read(path)
    missing = [name for name in request.output_names if name not in arrays]
    if missing or not request.output_names:
        raise UsageError(
            f"'{path}' has no output {', '.join(map(repr, missing)) or 'that is named'}; it has "
            f"{', '.join(arrays) or 'nothing'}"
        )
    outputs = {name: arrays[name] for name in request.output_names}
    inputs = {name: array for name, array in arrays.items() if name not in outputs}
    if not inputs:
        raise UsageError(f"'{path}' has only outputs; record the inputs by name as well")
    signature = ModelSignature(
        tuple(_spec(name, array) for name, array in inputs.items()),
        tuple(_spec(name, array) for name, array in outputs.items()),
        request.max_batch_size,
    )
    answers = _Answers(inputs, outputs)
    return Source(
        framework=Framework.RECORDED,
        model=None,
        spec=ModelSpec(
            path.stem,
            lambda model, max_batch_size: signature,
            sample=answers.sample,
            recorded=answers.rows,
        ),
        signature=signature,
        reference=answers,
        parameter_count=0,
        origins=(Origin(path.name, sha256_of(path)),),
    )


def _read(path: Path) -> dict[str, Array]:
    read = input_files.read_arrays(path)
    arrays = {name: np.ascontiguousarray(array) for name, array in read.items()}
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        raise UsageError(f"'{path}': the numbers of rows differ or are 0: {lengths}")
    for name, array in arrays.items():
        if array.dtype not in _DATATYPES:
            raise UsageError(f"'{path}': '{name}' is {array.dtype}, which no protocol supports")
    return arrays


def _spec(name: str, array: Array) -> TensorSpec:
    dims = array.shape[1:]
    reshape = None if dims else ()  # a scalar travels as [1]
    return TensorSpec(name, _DATATYPES[array.dtype], dims or (1,), reshape=reshape)


class _Answers:
    """The recorded rows, as a reference that knows no others."""

    def __init__(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        self._inputs, self._outputs = inputs, outputs
        self.rows = len(next(iter(inputs.values())))
        #: The rows of equal inputs take turns, since each has an answer of its own.
        self._numbers: defaultdict[bytes, deque[int]] = defaultdict(deque)
        for row in range(self.rows):
            self._numbers[self._key(inputs, row)].append(row)
        self._next = itertools.cycle(range(self.rows))

    @staticmethod
    def _key(inputs: Mapping[str, Array], row: int) -> bytes:
        return b"".join(inputs[name][row].tobytes() for name in sorted(inputs))

    def sample(
        self,
        signature: ModelSignature,
        batch: int,
        sizes: Mapping[str, int],
        rng: np.random.Generator,
    ) -> dict[str, Array]:
        """The next rows, so that each has its turn."""
        rows = [next(self._next) for _ in range(batch or 1)]
        return {name: array[rows] for name, array in self._inputs.items()}

    def _next_of(self, key: bytes) -> int:
        numbers = self._numbers[key]
        numbers.rotate(-1)
        return numbers[-1]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        count = len(next(iter(inputs.values())))
        rows = [self._next_of(self._key(inputs, row)) for row in range(count)]
        return {name: array[rows] for name, array in self._outputs.items()}
