"""Limits of an artifact's error: a tolerance for each value in fp32, bounds in lower precisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from modelport.gateway.types import Array

#: Values that are compared at a time.
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest error of a value in fp32, ``atol + rtol * |reference|``.

    Integers and bools must be equal.
    """

    atol: float
    rtol: float

    def __str__(self) -> str:
        return f"{self.atol:g} + {self.rtol:g} * |reference|"

    def ratio(self, expected: Array, actual: Array) -> Array:
        """The error of each value in units of its tolerance.

        NaN equals NaN, and infinity itself; of these and of unequal integers the error is infinite.
        """
        if expected.dtype.kind != "f":
            return np.where(actual == expected, 0.0, np.inf)
        # Another runtime may round to the neighbouring half-precision number.
        coarse = float(np.finfo(expected.dtype).eps) if expected.dtype.itemsize < 4 else 0.0
        with np.errstate(all="ignore"):  # undefined values may be infinite, or not numbers
            reference = expected.astype(np.float64)
            allowed = self.atol + max(self.rtol, coarse) * np.abs(reference)
            error = np.abs(actual.astype(np.float64) - reference)
            equal = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
            ratio = np.where(np.isfinite(error), error / allowed, np.inf)
            return np.where(equal, 0.0, ratio)

    def outside(self, expected: Array, actual: Array) -> Array:
        """The values whose error is larger."""
        found = np.empty(expected.shape, bool)
        flat = found.reshape(-1)
        for start, theirs, ours in pieces(expected, actual):
            flat[start : start + len(theirs)] = ~(self.ratio(theirs, ours) <= 1)
        return found


#: The default in fp32; a model's specification may have another one.
FP32 = Tolerance(atol=1e-5, rtol=1e-4)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits for an artifact in a precision below fp32.

    Attributes:
        agreement: fraction of decisions that must equal the checkpoint's.
        relative_error: largest ``|error| / |reference|`` over all of an output's values (ratio of
            L2 norms), for a model that declares no decision.
    """

    agreement: float
    relative_error: float


#: The key for a graph in fp32 that approximates a function.
APPROXIMATE = "approximate"
#: The defaults by precision below fp32.
BOUNDS: Mapping[str, Bounds] = {
    "fp16": Bounds(agreement=0.995, relative_error=0.01),
    "bf16": Bounds(agreement=0.98, relative_error=0.05),
    APPROXIMATE: Bounds(agreement=0.995, relative_error=0.01),
    "int8": Bounds(agreement=0.97, relative_error=0.1),
    "int8-weight-only": Bounds(agreement=0.98, relative_error=0.05),
    "int4": Bounds(agreement=0.9, relative_error=0.2),
}


def pieces(expected: Array, actual: Array) -> Iterator[tuple[int, Array, Array]]:
    """Both arrays in flat pieces with their start: in float64, logits would take gigabytes."""
    theirs, ours = expected.reshape(-1), actual.reshape(-1)
    for start in range(0, len(theirs), PIECE):
        yield start, theirs[start : start + PIECE], ours[start : start + PIECE]
