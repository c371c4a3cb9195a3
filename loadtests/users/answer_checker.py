"""Whether an answer is the right one: a fast wrong answer is a failure.

Bytes that were once found right are right: a comparison of bytes is all that most answers cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from modelport.loadtests.payloads import Array, Payloads, Tensors

#: Different bytes of right answers that are remembered, for each request.
MOST_KNOWN = 64

#: The name of an output that came without one, as TensorFlow Serving sends a single one.
ONLY = ""

#: (an answer's bytes, how many of them are JSON; None: all) → its outputs
Read = Callable[[bytes, int | None], Tensors]


class Checker:
    """Of one target. Not thread-safe; greenlets switch nowhere in it."""

    def __init__(self, payloads: Payloads, read: Read) -> None:
        self._read = read
        self._expected: list[Tensors | None] = list(
            payloads.expected or [None] * len(payloads.requests)
        )
        #: Outputs that the model itself gives in another shape than the wire's.
        self._reshaped = frozenset(payloads.reshape)
        self._batched = payloads.batch_size > 0
        self._atol, self._rtol = payloads.absolute_tolerance, payloads.relative_tolerance
        self._known: list[set[tuple[bytes, int | None]]] = [set() for _ in payloads.requests]

    def learn(self, number: int, body: bytes, json_size: int | None) -> None:
        """Take the answer to request ``number`` for the right one, where none was recorded.

        Raises:
            ValueError, KeyError, ...: it cannot be read.
        """
        if self._expected[number] is None:
            self._expected[number] = self._read(body, json_size)
            self._known[number].add((body, json_size))

    def problem(self, number: int, body: bytes, json_size: int | None) -> str | None:
        """What is wrong with the answer to request ``number``; None: nothing."""
        if (body, json_size) in self._known[number]:
            return None
        try:
            found = self._read(body, json_size)
        except Exception as error:  # whatever a broken answer leads a reader to
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
        """The first wrong value of a wrong answer to request ``number``, and the right one."""
        try:
            found, expected = self._read(body, json_size), self._expected[number] or {}
        except Exception:  # ``problem`` says what it is
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
        """Which values are wrong; both are flat and of one size."""
        if right.dtype.kind != "f" or got.dtype.kind not in "fiu":
            return np.asarray(got != right, np.bool_)
        return ~np.isclose(got, right, self._rtol, self._atol, equal_nan=True)


def _off(got: Array, right: Array) -> str:
    """How far, to a power of ten: messages that are the same are counted together."""
    with np.errstate(over="ignore", invalid="ignore"):
        error = float(np.abs(got.astype(np.float64) - right).max())
    if not math.isfinite(error):
        return "not finite"
    return f"off by {10.0 ** math.floor(math.log10(error)):g} or more"


def _shape(array: Array) -> tuple[int, ...]:
    """Without the ones, which recorded rows often lack; a transposed answer is a wrong one."""
    return tuple(size for size in array.shape if size != 1)
