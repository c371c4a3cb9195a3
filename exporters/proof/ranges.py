"""Ranges of integer inputs that nobody declared: the values on which artifact and model agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from modelport.exporters.formats.base import ParitySession
from modelport.exporters.loaded_model import Source
from modelport.exporters.proof.parity_cases import EDGE_ROWS
from modelport.exporters.requests.random_inputs import WITHIN, Fill, draw, name_axes, sizes_of
from modelport.exporters.tolerance import Tolerance
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, ModelSignature, TensorSpec

#: The largest absolute values that are tried where an artifact differs: of a float's exact
#: integers, of other integer datatypes, of values without a range until now.
LEVELS = tuple((1 << bits) - 1 for bits in (53, 31, 24, 16, 15, 11, 10, 8, 7))


def agreeing(
    source: Source, session: ParitySession, seed: int, tolerance: Tolerance | None
) -> Source:
    """``source`` with each found range narrowed to values on which the artifact agrees.

    Where it agrees on none of the ranges, they are left to the proof as they are.

    Args:
        tolerance: None for a precision below fp32, in which only infinity and NaN tell.
    """
    for name in sorted(source.found_ranges):
        for signature in _narrower(source.signature, name):
            tried = replace(source, signature=signature)
            if _agree(tried, session, seed, name, tolerance):
                source = tried
                break
    return source


def _narrower(signature: ModelSignature, name: str) -> Iterator[ModelSignature]:
    """``signature``, then with ever narrower ranges of the input ``name``."""
    least, most = _numbers(next(spec for spec in signature.inputs if spec.name == name))
    tried = set()
    for level in (max(-least, most), *LEVELS):
        for low in (max(least, -level), max(least, 0)):
            high = min(most, level)
            if low <= high and (low, high) not in tried:
                tried.add((low, high))
                yield applied(signature, {name: (low, high)})


def applied(signature: ModelSignature, ranges: Mapping[str, tuple[int, int]]) -> ModelSignature:
    """``signature`` with other ranges of some inputs."""
    inputs = tuple(
        replace(x, minimum=ranges[x.name][0], maximum=ranges[x.name][1]) if x.name in ranges else x
        for x in signature.inputs
    )
    return replace(signature, inputs=inputs)


def of(source: Source) -> dict[str, tuple[int, int]]:
    """The found ranges in the signature of ``source``."""
    inputs = source.signature.inputs
    return {spec.name: _numbers(spec) for spec in inputs if spec.name in source.found_ranges}


def _numbers(spec: TensorSpec) -> tuple[int, int]:
    assert isinstance(spec.minimum, int)
    assert isinstance(spec.maximum, int)
    return spec.minimum, spec.maximum


def is_whole(datatype: Datatype, low: int, high: int) -> bool:
    """Whether a range has every value of ``datatype``."""
    limits = np.iinfo(NUMPY_DTYPES[datatype])
    return (low, high) == (limits.min, limits.max)


def _agree(
    source: Source, session: ParitySession, seed: int, name: str, tolerance: Tolerance | None
) -> bool:
    named = name_axes(source.signature)
    sizes = {axis: sizes_of(found)[0] for axis, found in named.axes.items()}
    rng = np.random.default_rng(seed)
    for fill in (*WITHIN[:2], Fill.RANDOM):
        batch = min(EDGE_ROWS if fill is Fill.RANDOM else 1, named.max_batch_size)
        fills = {**dict.fromkeys(source.found_ranges, Fill.ZERO), name: fill}
        inputs = draw(named, batch, sizes, rng, fills, source.spec.masks)
        try:
            expected = source.reference(inputs)
        except Exception:
            return True  # the proof says so
        try:
            actual = session(inputs)
        except Exception:
            return False
        if any(_differ(x, actual[key], tolerance) for key, x in expected.items() if key in actual):
            return False
    return True


def _differ(expected: Array, actual: Array, tolerance: Tolerance | None) -> bool:
    if expected.shape != actual.shape:
        return True
    if tolerance is None:
        return bool((np.isfinite(expected) != np.isfinite(actual)).any())
    return bool(tolerance.outside(expected, actual).any())
