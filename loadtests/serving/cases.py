"""Requests one by one, each with the answer that it must get: what is asked before any load.

The file is a payload file of ``loadtests.payloads`` with right answers, as ``modelport sample``
writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loadtests import payloads
from loadtests.payloads import Array, BadPayload, Payloads


@dataclass(frozen=True)
class Case:
    """One request: arrays by name in the wire's shapes, and the answer it must get."""

    inputs: Mapping[str, Array]
    expected: Mapping[str, Array]


@dataclass(frozen=True)
class Cases:
    """Right is ``|error| <= atol + rtol * |expected|``; what is no float must be the same."""

    cases: tuple[Case, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    atol: float
    rtol: float
    reshape: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def wrong(self, case: Case, answer: Mapping[str, Array]) -> str | None:
        """What is wrong with an answer to ``case``; None: nothing."""
        for name, expected in case.expected.items():
            got = answer.get(name)
            if got is None:
                return f"output '{name}' is missing"
            if got.shape != expected.shape:
                return f"output '{name}' has shape {list(got.shape)}, not {list(expected.shape)}"
            if said := self._differs(got, expected):
                return f"output '{name}' {said}"
        return None

    def _differs(self, got: Array, expected: Array) -> str | None:
        if expected.dtype.kind != "f" or got.dtype.kind not in "fiu":
            return None if np.array_equal(got, expected) else "is not what was expected"
        wanted = expected.astype(np.float64)
        error = np.abs(got.astype(np.float64) - wanted)
        if (error <= self.atol + self.rtol * np.abs(wanted)).all():
            return None
        return f"is off by {float(np.nanmax(error, initial=0.0)):.3g}"


def read(path: Path) -> Cases:
    """The cases in ``path``.

    Raises:
        BadPayload: it cannot be read, or has no right answers.
    """
    found = payloads.read(path)
    if found.expected is None:
        raise BadPayload(f"{path}: no right answers in it; 'modelport sample' writes them")
    return Cases(
        tuple(Case(*pair) for pair in zip(found.requests, found.expected, strict=True)),
        inputs=found.datatypes,
        outputs=found.output_datatypes,
        atol=found.absolute_tolerance,
        rtol=found.relative_tolerance,
        reshape=found.reshape,
    )


def write(path: Path, cases: Cases) -> None:
    """``cases`` as a file that ``read`` reads back bit for bit."""
    made = Payloads(
        tuple(case.inputs for case in cases.cases),
        cases.inputs,
        tuple(case.expected for case in cases.cases),
        cases.reshape,
        cases.atol,
        cases.rtol,
        cases.outputs,
    )
    payloads.write(made, path)
