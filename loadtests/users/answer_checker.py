"""Checks of answers under load: a fast wrong answer is a failure.

The bytes of correct answers are remembered, so most answers cost one comparison of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from modelport.loadtests.load.payloads import Array, Payloads, Tensors

#: Most different correct answers remembered per request.
MOST_KNOWN = 64

#: Name of an output sent without one, as TensorFlow Serving does with a single output.
ONLY = ""

#: Maps an answer's bytes, and the size of their JSON part (None: all), to its outputs.
Read = Callable[[bytes, int | None], Tensors]


class Checker:
    """The checker of one target. Not thread-safe; greenlets never switch inside it."""

    def __init__(self, payloads: Payloads, read: Read) -> None:
        self._read = read
        self._expected: list[Tensors | None] = list(
            payloads.expected or [None] * len(payloads.requests)
        )
        #: Outputs whose own shape in the model differs from the wire's.
        self._reshaped = frozenset(payloads.reshape)
        self._batched = payloads.batch_size > 0
        self._atol, self._rtol = payloads.absolute_tolerance, payloads.relative_tolerance
        self._known: list[set[tuple[bytes, int | None]]] = [set() for _ in payloads.requests]

    def learn(self, number: int, body: bytes, json_size: int | None) -> None:
        """Take the answer to request ``number`` as the expected one, if none was recorded.

        Raises:
            ValueError, KeyError, ...: it cannot be read.
        """
        if self._expected[number] is None:
            self._expected[number] = self._read(body, json_size)
            self._known[number].add((body, json_size))

    def problem(self, number: int, body: bytes, json_size: int | None) -> str | None:
        """The problem of the answer to request ``number``, or None."""
        if (body, json_size) in self._known[number]:
            return None
        try:
            found = self._read(body, json_size)
        except Exception as error:  # a broken answer can raise almost anything
            return f"unreadable answer: {type(error).__name__}: {error}"[:200]
        expected = self._expected[number]
        if expected is None:
            return None
        if ONLY in found and len(expected) == 1:
            found = dict.fromkeys(expected, found[ONLY])
        for name, wanted in expected.items():
            if name not in found:
                return f"output '{name}' is missing"
            if said := self._differs(found[name], wanted):
                return f"output '{name}' {said}"
            if name not in self._reshaped and self._turned(found[name], wanted):
                return f"output '{name}' has shape {found[name].shape}, not {wanted.shape}"
        if len(self._known[number]) < MOST_KNOWN:
            self._known[number].add((body, json_size))
        return None

    def explained(self, number: int, body: bytes, json_size: int | None) -> str:
        """The first wrong value of the answer to request ``number``, and the expected one."""
        try:
            found, expected = self._read(body, json_size), self._expected[number] or {}
        except Exception:  # ``problem`` describes it
            return self.problem(number, body, json_size) or ""
        if ONLY in found and len(expected) == 1:
            found = dict.fromkeys(expected, found[ONLY])
        for name, wanted in expected.items():
            if name in found and found[name].size == wanted.size:
                bad = self._bad(found[name].ravel(), wanted.ravel())
                if bad.any():
                    return self._told(name, int(bad.argmax()), found[name], wanted)
        return self.problem(number, body, json_size) or ""

    def _told(self, name: str, at: int, found: Array, wanted: Array) -> str:
        got, right = found.ravel()[at], wanted.ravel()[at]
        place = [int(index) for index in np.unravel_index(at, wanted.shape)]
        told = f"output '{name}' is {got} at {place}, expected {right}"
        if right.dtype.kind != "f" or found.dtype.kind not in "fiu":
            return told
        return (
            f"{told}: a difference of {abs(float(got) - float(right)):.3g}, allowed is "
            f"{self._atol:g} + {self._rtol:g} x |expected|"
        )

    def _turned(self, found: Array, wanted: Array) -> bool:
        if self._batched and found.shape[:1] != wanted.shape[:1]:
            return True
        return _shape(found) != _shape(wanted)

    def _differs(self, found: Array, wanted: Array) -> str | None:
        if found.size != wanted.size:
            return f"has {found.size} values, not {wanted.size}"
        got, right = found.ravel(), wanted.ravel()
        bad = self._bad(got, right)
        if not bad.any():
            return None
        if right.dtype.kind != "f" or got.dtype.kind not in "fiu":
            return "is not what was expected"
        return f"is {_off(got[bad], right[bad])}"

    def _bad(self, got: Array, right: Array) -> npt.NDArray[np.bool_]:
        """Mask of wrong values; both arrays are flat and of one size."""
        if right.dtype.kind != "f" or got.dtype.kind not in "fiu":
            return np.asarray(got != right, np.bool_)
        return ~np.isclose(got, right, self._rtol, self._atol, equal_nan=True)


def _off(got: Array, right: Array) -> str:
    """The size of the error as a power of ten, so that similar messages are counted together."""
    with np.errstate(over="ignore", invalid="ignore"):
        error = float(np.abs(got.astype(np.float64) - right).max())
    if not math.isfinite(error):
        return "not finite"
    return f"off by {10.0 ** math.floor(math.log10(error)):g} or more"


def _shape(array: Array) -> tuple[int, ...]:
    """The shape without ones, which recorded rows often lack; a transposed answer is wrong."""
    return tuple(size for size in array.shape if size != 1)
