"""``model_warmup`` of ``config.pbtxt``: requests that a version answers before it is READY.

As in Triton, all elements of a sample's batch are the same, a sample runs ``count`` times on every
instance, past cache, batcher and statistics, and the first sample that fails fails the load.
Backends warm up by themselves before, with requests of their own.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import numpy as np
import structlog

from modelport.gateway.errors import (
    Internal,
    InvalidArgument,
    ModelportError,
    TimedOut,
    Unavailable,
    closest,
)
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import scheduler_tensors, untrusted_files
from modelport.gateway.repository.scan import ModelEntry
from modelport.gateway.types import (
    NUMPY_DTYPES,
    Array,
    Datatype,
    Deadline,
    InferRequest,
    Parameter,
    Tensor,
    TensorSpec,
    finished,
)
from modelport.gateway.upstream.pool import on_loop
from modelport.gateway.wire import raw_tensors

log = structlog.get_logger("modelport.models")

#: Runs of all samples on all instances; ``count`` alone may be 2^32.
MAX_RUNS = 10_000
_MAX_QUOTED = 256


def run(
    version: ServedVersion,
    entry: ModelEntry,
    loop: asyncio.AbstractEventLoop,
    most_bytes: int,
    seconds: float,
) -> None:
    """Run the samples of ``version``, which lies in the folder of ``entry``. Blocking.

    Args:
        loop: the event loop, on which backends are called.
        most_bytes: limit of the inputs of a sample.
        seconds: limit of all runs together.

    Raises:
        InvalidArgument: a sample is invalid, or the model refuses it.
        Unavailable: the model's own server is down.
    """
    deadline = Deadline.after(seconds)
    specs = {spec.name: spec for spec in version.signature.inputs}
    for name, sample, runs in list(_planned(version)):
        with _naming(name):
            inputs = _Sample(version, specs, entry, sample, most_bytes).inputs()
            version.validator.check(InferRequest(version.name, inputs))
            for _ in range(runs):
                on_loop(loop, _answer(version, list(inputs), deadline))


def _planned(version: ServedVersion) -> Iterator[tuple[str, Any, int]]:
    """Name, sample and number of runs; raises ``InvalidArgument`` if they are too many."""
    instances, left = configuration.instance_count(version.config), MAX_RUNS
    for index, sample in enumerate(version.config.model_warmup):
        name = sample.name[:_MAX_QUOTED] or f"#{index}"
        if not sample.batch_size:  # Triton skips it, too
            log.warning(
                "a warmup sample of batch_size 0 does not run", model=version.name, sample=name
            )
            continue
        runs = max(1, sample.count) * instances
        left -= runs
        with _naming(name):
            if left < 0:
                raise InvalidArgument(
                    f"its 'count' {sample.count} on {instances} instances makes {runs} runs, and "
                    f"all samples together may make {MAX_RUNS}"
                )
        yield name, sample, runs


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the sample, in Triton's words, in the error of a run."""
    try:
        yield
    except ModelportError as error:
        kind = Unavailable if isinstance(error, Unavailable) else InvalidArgument
        raise kind(
            f"failed to run warmup sample '{name}': {str(error).rstrip('.')}; correct or remove it "
            "in 'model_warmup'"
        ) from error


async def _answer(version: ServedVersion, inputs: list[Tensor], deadline: Deadline) -> None:
    request = InferRequest(
        version.name, inputs, model_version=version.number, parameters=_sequence(version)
    )
    infer = version.infer if request.parameters else version.backend
    try:
        if deadline.expired:  # a run that does not wait would not notice
            raise TimedOut
        async with asyncio.timeout(deadline.remaining()):
            if not version.decoupled:
                await finished(infer(request, deadline))
                return
            async with aclosing(version.stream(request, deadline)) as responses:
                async for _ in responses:
                    pass
    except (TimeoutError, TimedOut):
        raise Internal("the load exceeds the limit of --model-load-timeout-secs") from None


def _sequence(version: ServedVersion) -> Mapping[str, Parameter]:
    """A sequence of one request, for a model of sequences: its scheduler adds the controls."""
    if not version.config.HasField("sequence_batching"):
        return {}
    id = scheduler_tensors.controls(version.config).get(scheduler_tensors.CORRELATION_ID)
    strings = id is not None and id.datatype is Datatype.BYTES
    return {
        "sequence_id": "warmup" if strings else 1, "sequence_start": True, "sequence_end": True,
    }  # fmt: skip


class _Sample:
    """The inputs of one sample."""

    def __init__(
        self,
        version: ServedVersion,
        specs: Mapping[str, TensorSpec],
        entry: ModelEntry,
        sample: Any,
        most_bytes: int,
    ) -> None:
        self._model, self._entry, self._sample = version.name, entry, sample
        self._specs, self._most_bytes = specs, most_bytes
        self._batch = (sample.batch_size,) if version.signature.max_batch_size else ()
        if sample.batch_size > max(1, version.signature.max_batch_size):
            raise InvalidArgument(
                f"'batch_size' is {sample.batch_size}, but 'max_batch_size' of the model is "
                f"{version.signature.max_batch_size}"
            )

    def inputs(self) -> list[Tensor]:
        """Make the inputs, once their size is known to be small enough.

        Raises:
            InvalidArgument: an input is unknown, too large, or its data is missing or invalid.
        """
        declared = {
            name: (self._datatype(name, source), self._shape(name, source))
            for name, source in sorted(self._sample.inputs.items())
        }
        size = sum(_size(datatype, (*self._batch, *shape)) for datatype, shape in declared.values())
        if size > self._most_bytes:
            raise InvalidArgument(
                f"its inputs take {size >> 20:,} MiB, and a request may take "
                f"{self._most_bytes >> 20:,} MiB (--max-request-memory); lower 'batch_size' or "
                "'dims'"
            )
        sizes = {
            axis: length
            for name, (_, shape) in declared.items()
            for axis, length in zip(self._specs[name].dims, shape, strict=False)
            if isinstance(axis, str)
        }
        return [
            Tensor(name, datatype, self._batched(self._element(name, datatype, shape, sizes)))
            for name, (datatype, shape) in declared.items()
        ]

    def _datatype(self, name: str, source: Any) -> Datatype:
        if name not in self._specs:
            close = closest(name, self._specs)
            hint = f"; do you mean '{close}'?" if close else ""
            raise InvalidArgument(
                f"unexpected inference input '{name}' for model '{self._model}'{hint}"
            )
        return configuration.datatype(source.data_type, f"input '{name}'")

    def _shape(self, name: str, source: Any) -> tuple[int, ...]:
        if -1 in source.dims:
            raise InvalidArgument(
                f"warmup setting expects all variable-size dimensions are specified for input "
                f"'{name}'"
            )
        return raw_tensors.parse_shape(name, source.dims)

    def _batched(self, element: Array) -> Array:
        return np.ascontiguousarray(np.broadcast_to(element, (*self._batch, *element.shape)))

    def _element(
        self, name: str, datatype: Datatype, shape: tuple[int, ...], sizes: Mapping[str, int]
    ) -> Array:
        source = self._sample.inputs[name]
        kind = source.WhichOneof("input_data_type")
        if kind is None:
            raise InvalidArgument(
                f"input '{name}' has no data: set zero_data, random_data or input_data_file"
            )
        if kind == "input_data_file":
            return self._read(name, datatype, shape, source.input_data_file)
        if datatype is Datatype.BYTES:  # as in Triton, random strings are empty, too
            return np.full(shape, b"", dtype=object)
        if kind == "zero_data":
            return np.zeros(shape, NUMPY_DTYPES[datatype])
        return _random(self._specs[name], datatype, shape, sizes)

    def _read(self, name: str, datatype: Datatype, shape: tuple[int, ...], filename: str) -> Array:
        where = f"'{configuration.WARMUP}/{filename[:_MAX_QUOTED]}'"
        data = untrusted_files.read_companion(
            self._entry.companion, configuration.WARMUP, filename, f"input '{name}'",
            self._most_bytes, "zero_data or random_data",
        )  # fmt: skip
        needed = _size(datatype, shape)
        if datatype is not Datatype.BYTES and len(data) > needed:  # Triton accepts it
            log.warning(
                "a warmup file is longer than its input; the rest is not read",
                model=self._model, file=filename, needed=needed, bytes=len(data),
            )  # fmt: skip
            data = data[:needed]
        try:
            return raw_tensors.decode(name, datatype, shape, data)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from error


def _size(datatype: Datatype, shape: tuple[int, ...]) -> int:
    """The bytes of an array; of BYTES, those of the references alone."""
    return math.prod(shape) * NUMPY_DTYPES[datatype].itemsize


def _random(
    spec: TensorSpec, datatype: Datatype, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> Array:
    """Random values in the range of ``spec``.

    Without a range they are from 0 to 1, which most tables and masks accept; Triton's are random
    bytes.

    Args:
        sizes: of the named axes, which bound values, too.
    """
    high = sizes.get(spec.maximum) if isinstance(spec.maximum, str) else spec.maximum
    low = spec.minimum if spec.minimum is not None else min(0, 0 if high is None else high)
    high = low + 1 if high is None else high
    rng = np.random.default_rng()
    dtype = NUMPY_DTYPES[datatype]
    if datatype is Datatype.BOOL:
        return rng.integers(0, 2, shape, np.uint8).view(dtype)
    if datatype is Datatype.BF16:  # its bits are the upper half of a float's
        return (rng.random(shape, np.float32).view("<u4") >> 16).astype(dtype)
    if dtype.kind == "f":
        values = rng.random(shape, np.float64 if dtype.itemsize == 8 else np.float32)
        return (low + values * (high - low)).astype(dtype)
    whole = np.iinfo(dtype)
    least, most = max(math.ceil(low), whole.min), min(math.floor(high), whole.max)
    if most < least:
        raise InvalidArgument(f"no {datatype} lies in the range of input '{spec.name}'")
    return rng.integers(least, most, shape, dtype, endpoint=True)
