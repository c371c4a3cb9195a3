"""Speed of two artifacts side by side: they take turns at the same inputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import numpy as np

from modelport.exporters.formats.base import ParitySession
from modelport.exporters.loaded_model import Source
from modelport.exporters.optimization.result import SpeedUp
from modelport.exporters.requests.random_inputs import name_axes, sizes_of, unpadded_sampler
from modelport.gateway.types import Array

#: Batch sizes that are measured, as far as the model takes them.
BATCH_SIZES = (1, 8)
#: Rounds are added until the time is up, but no fewer and no more than these.
FEWEST_ROUNDS, MOST_ROUNDS = 5, 50
SECONDS = 1.0


def measure(
    source: Source, before: ParitySession, after: ParitySession, seed: int
) -> tuple[SpeedUp, ...]:
    """Compare ``after`` with ``before`` at axes of middle size, for each batch size."""
    signature = name_axes(source.signature)
    largest = signature.max_batch_size
    sizes = {name: sizes_of(a)[len(sizes_of(a)) // 2] for name, a in signature.axes.items()}
    rng = np.random.default_rng(seed)
    sample = unpadded_sampler(source.spec)
    batches = sorted({min(size, largest) for size in BATCH_SIZES})
    return tuple(
        _compare(batch, sample(signature, batch, sizes, rng), before, after) for batch in batches
    )


def _compare(
    batch: int, inputs: Mapping[str, Array], before: ParitySession, after: ParitySession
) -> SpeedUp:
    pairs: list[tuple[float, float]] = []
    _seconds(before, inputs), _seconds(after, inputs)  # the first run allocates
    ends = time.perf_counter() + SECONDS
    while len(pairs) < FEWEST_ROUNDS or (len(pairs) < MOST_ROUNDS and time.perf_counter() < ends):
        if len(pairs) % 2:  # neither is always the one that finds the caches warm
            then, now = _seconds(before, inputs), _seconds(after, inputs)
        else:
            now, then = _seconds(after, inputs), _seconds(before, inputs)
        pairs.append((then, now))
    ratios = [then / now for then, now in pairs]
    low, high = np.quantile(ratios, (0.25, 0.75))
    return SpeedUp(
        batch=batch,
        shapes={name: tuple(array.shape) for name, array in inputs.items()},
        rounds=len(pairs),
        seconds_before=statistics.median(then for then, _ in pairs),
        seconds_after=statistics.median(now for _, now in pairs),
        ratio=statistics.median(ratios),
        low=float(low),
        high=float(high),
    )


def _seconds(session: ParitySession, inputs: Mapping[str, Array]) -> float:
    started = time.perf_counter()
    session(inputs)
    return time.perf_counter() - started
