"""The tolerance of a value: ``atol + rtol * |reference|``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from modelport.gateway.types import Array

#: Values that are compared at a time.
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The error that fp32 is held to; integers and bools must be equal."""

    atol: float
    rtol: float

    def __str__(self) -> str:
        return f"{self.atol:g} + {self.rtol:g} * |reference|"

    def ratio(self, expected: Array, actual: Array) -> Array:
        """The error of each value in units of its tolerance; infinite for unequal integers."""
        if expected.dtype.kind != "f":
            return np.where(actual == expected, 0.0, np.inf)
        # Another runtime may round to the neighbouring half-precision number.
        coarse = float(np.finfo(expected.dtype).eps) if expected.dtype.itemsize < 4 else 0.0
        with np.errstate(all="ignore"):  # undefined values may be infinite, or not numbers
            reference = expected.astype(np.float64)
            allowed = self.atol + max(self.rtol, coarse) * np.abs(reference)
            error = np.abs(actual.astype(np.float64) - reference)
            return np.where(error == 0, 0.0, error / allowed)

    def outside(self, expected: Array, actual: Array) -> Array:
        """The values whose error is larger."""
        found = np.empty(expected.shape, bool)
        flat = found.reshape(-1)
        for start, theirs, ours in pieces(expected, actual):
            flat[start : start + len(theirs)] = ~(self.ratio(theirs, ours) <= 1)
        return found


def pieces(expected: Array, actual: Array) -> Iterator[tuple[int, Array, Array]]:
    """Both arrays in flat pieces with their start: in float64, logits would take gigabytes."""
    theirs, ours = expected.reshape(-1), actual.reshape(-1)
    for start in range(0, len(theirs), PIECE):
        yield start, theirs[start : start + PIECE], ours[start : start + PIECE]
