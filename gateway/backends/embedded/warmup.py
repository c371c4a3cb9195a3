"""Warm-up of a model: synthetic requests of every batch size that is worth the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import structlog

from modelport.gateway.backends.embedded.instances import INLINE_SECONDS
from modelport.gateway.errors import Internal, InvalidArgument
from modelport.gateway.settings import usable_memory_bytes
from modelport.gateway.types import (
    NUMPY_DTYPES,
    Array,
    Axis,
    Datatype,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    TensorSpec,
)

log = structlog.get_logger("modelport.backends")

#: Warm-up stops after this time. It begins with the largest batch, so that arenas grow once.
WARMUP_BUDGET_SECONDS = 10.0
#: Larger inputs are not warmed up: between its inputs and outputs a model may need many times
#: their size.
WARMUP_MAX_BYTES = 256 * 1024 * 1024
#: The limit for batches of more than one element, outputs included.
WARMUP_MAX_BATCH_BYTES = 64 * 1024 * 1024
MAX_WARM_BATCHES = 64
#: A dynamic dimension without an upper bound is warmed up, and may run inline, up to this size.
WARMUP_UNBOUNDED_SIZE = 1
_FLOATS = (Datatype.FP16, Datatype.FP32, Datatype.FP64)


class Contradiction(Internal):
    """The outputs of the model contradict its configuration."""


class Warmth(NamedTuple):
    """The result of a warm-up.

    Attributes:
        first: the response to the largest batch; None: nothing could be run.
        inline_elements: requests of at most this many input elements are fast enough to run on the
            event loop; 0: none.
    """

    first: InferResponse | None = None
    inline_elements: int = 0


def warm(
    run: Callable[[InferRequest], InferResponse],
    model_name: str,
    signature: ModelSignature,
    repeats: int = 1,
    inline_seconds: float = INLINE_SECONDS,
    once: bool = False,
) -> Warmth:
    """Run every batch size that is worth the time.

    A model may refuse synthetic values; it is then served cold.

    Args:
        repeats: the runs of the largest batch; some runtimes compile during a later run.
        inline_seconds: shorter runs may be made on the event loop.
        once: the largest batch runs once, and no other: few requests are going to follow.

    Raises:
        InvalidArgument: the model's outputs contradict its configuration.
    """
    deadline = time.monotonic() + WARMUP_BUDGET_SECONDS
    first: InferResponse | None = None
    inline_elements = 0
    for batch in batch_sizes(signature.max_batch_size):
        if not is_worth_warming(signature, batch):
            continue
        request = InferRequest(model_name, list(samples(signature, batch)))
        try:
            response, seconds = _timed(run, request)
            if first is None:  # the largest batch is the slowest inline run
                first = response
                if once:
                    break
                for _ in range(repeats - 1):
                    seconds = min(seconds, _timed(run, request)[1])
                if seconds < 100 * inline_seconds:
                    fastest = min(_timed(run, request)[1] for _ in range(3))
                    if fastest < inline_seconds:
                        inline_elements = _inline_elements(signature, request)
        except Contradiction as error:
            raise InvalidArgument(str(error)) from error
        except Internal as error:
            log.warning("warm-up failed; served cold", model=model_name, reason=str(error))
            return Warmth(first, 0 if first is None else inline_elements)
        if time.monotonic() > deadline:
            break
    return Warmth(first, inline_elements)


def is_worth_warming(signature: ModelSignature, batch: int) -> bool:
    size = batch * _bytes(signature.inputs, signature.axes)
    if batch == 1:
        return size <= WARMUP_MAX_BYTES
    results = batch * _bytes(signature.outputs, signature.axes)
    return size + results <= min(WARMUP_MAX_BYTES, WARMUP_MAX_BATCH_BYTES)


def check_size(signature: ModelSignature) -> None:
    """Raise ``InvalidArgument`` unless the largest batch fits the machine.

    It uses only declared sizes. Without it every large request would fail at run time.
    """
    batch, most = max(1, signature.max_batch_size), usable_memory_bytes()
    size = batch * _bytes((*signature.inputs, *signature.outputs), signature.axes)
    if size > most:
        raise InvalidArgument(
            f"'max_batch_size' {signature.max_batch_size} allows a batch whose inputs and outputs "
            f"take {size >> 20:,} MiB, but this machine has {most >> 20:,} MiB; lower "
            "'max_batch_size', 'dims' or the bounds of axes"
        )


def _inline_elements(signature: ModelSignature, request: InferRequest) -> int:
    # Integers may be loop counts or shapes, so that the size does not determine the time.
    floats = all(spec.datatype in _FLOATS for spec in signature.inputs)
    return sum(tensor.data.size for tensor in request.inputs) if floats else 0


def _timed(
    run: Callable[[InferRequest], InferResponse], request: InferRequest
) -> tuple[InferResponse, float]:
    started = time.perf_counter()
    return run(request), time.perf_counter() - started


def batch_sizes(maximum: int) -> Iterator[int]:
    """Yield ``maximum`` and its halves down to 1, then the sizes between."""
    maximum = max(1, maximum)
    halves = [maximum >> shift for shift in range(maximum.bit_length())]
    yield from halves
    yield from (batch for batch in range(1, min(maximum, MAX_WARM_BATCHES)) if batch not in halves)


def samples(signature: ModelSignature, batch: int) -> Iterator[Tensor]:
    """Valid inputs of the largest size within the signature's bounds, in the model's own shapes."""
    for spec in signature.inputs:
        if spec.optional:
            continue
        dims = _model_dims(spec, signature.axes)
        shape = (batch, *dims) if signature.max_batch_size else dims
        if spec.datatype is Datatype.BYTES:
            data: Array = np.full(shape, b"", dtype=object)
        else:
            value = spec.minimum or 0
            if isinstance(spec.maximum, str):
                value = _size(signature.axes[spec.maximum])
            data = np.full(shape, value, dtype=NUMPY_DTYPES[spec.datatype])
        yield Tensor(spec.name, spec.datatype, data)


def _bytes(specs: Sequence[TensorSpec], axes: Mapping[str, Axis]) -> int:
    """The declared size of one batch element of inputs or outputs."""
    return sum(
        math.prod(_model_dims(spec, axes)) * NUMPY_DTYPES[spec.datatype].itemsize for spec in specs
    )


def _model_dims(spec: TensorSpec, axes: Mapping[str, Axis]) -> tuple[int, ...]:
    sizes = [
        _size(axes[d]) if isinstance(d, str) else d if d != -1 else WARMUP_UNBOUNDED_SIZE
        for d in spec.dims
    ]
    if spec.reshape is None:
        return tuple(sizes)
    dynamic = iter([s for s, d in zip(sizes, spec.wire_dims, strict=True) if d == -1])
    return tuple(next(dynamic) if d == -1 else d for d in spec.reshape)


def _size(axis: Axis) -> int:
    return axis.maximum if axis.maximum is not None else max(axis.minimum, WARMUP_UNBOUNDED_SIZE)
