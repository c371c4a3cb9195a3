"""Comparisons of edge inputs: values beyond every range, and rows beside other rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from modelport.exporters.errors import ParityError
from modelport.exporters.formats.base import ParitySession
from modelport.exporters.loaded_model import Source
from modelport.exporters.proof.conditioning import CAP
from modelport.exporters.proof.parity_cases import ParityCase
from modelport.exporters.proof.parity_report import Limit, ParityReport
from modelport.exporters.requests.random_inputs import Fill
from modelport.exporters.tolerance import Tolerance
from modelport.gateway.errors import ModelportError, Unsupported
from modelport.gateway.types import Array, TensorSpec

#: Inputs that have no number; a model that answers them with numbers handles them.
WITHOUT_NUMBER = (Fill.MISSING, Fill.NAN, Fill.INFINITY, Fill.MINUS_INFINITY)
#: Errors of larger multiples of the tolerance are differences, also where rounding moves much.
GROSS = CAP

Arrays = Mapping[str, Array]


class ValuesDiffer(ParityError):
    """The artifact's values differ from the model's at ``inputs``."""

    def __init__(self, message: str, inputs: Mapping[str, Array]) -> None:
        super().__init__(message)
        self.inputs = inputs


def compare_beyond(
    source: Source, session: ParitySession, case: ParityCase, report: ParityReport
) -> None:
    """Compare the answers to values that no range excludes, and record the differences.

    A model that fails on such values has no answer to compare with. Of rows beside each other, the
    model's own answers are compared.

    Raises:
        Unsupported: a row's answer changes with the other rows.
        ValuesDiffer: for an input without a number, or a large one in fp32, which the model answers
            with finite numbers.
    """
    kind, *_ = case.kinds
    try:
        expected = source.reference(case.inputs)
    except ModelportError:
        raise
    except Exception:
        report.edges[f"{kind}, where the model fails"] += 1
        return
    report.edges[kind] += 1
    if case.batch > 1:
        tolerance = Tolerance(report.atol, report.rtol)
        report.neighbours += check_neighbours(source, case, expected, tolerance)
        return
    try:
        actual = session(case.inputs)
    except Exception:
        actual = {}
    floats = [x for x in expected.values() if x.dtype.kind == "f"]
    handled = bool(floats) and all(np.isfinite(x).all() for x in floats)
    found = list(_differences(kind, expected, actual, report))
    overflows = kind == Fill.LARGE and report.bounds is None and _overflows(expected, actual)
    answered = found and handled and kind in WITHOUT_NUMBER
    if overflows or (answered and (source.compares is None or source.compares())):
        raise ValuesDiffer(
            f"for {found[0]}, and the model's answer is finite; declare the range of valid inputs, "
            "or remove such values in forward(), with nan_to_num() or clamp()",
            case.inputs,
        )
    report.limits += found


def _overflows(expected: Arrays, actual: Arrays) -> bool:
    """Whether the artifact has no number where the model has one."""
    pairs = ((x, actual.get(name)) for name, x in expected.items() if x.dtype.kind == "f")
    return any(
        y is not None and x.shape == y.shape and bool((np.isfinite(x) & ~np.isfinite(y)).any())
        for x, y in pairs
    )


def _differences(
    values: str, expected: Arrays, actual: Arrays, report: ParityReport
) -> Iterator[Limit]:
    for name, theirs in expected.items():
        ours = actual.get(name)
        if ours is None or ours.shape != theirs.shape:
            yield Limit(values, name, "an answer", "an error")
            continue
        if report.bounds is None:
            wrong = Tolerance(report.atol, report.rtol).ratio(theirs, ours) > GROSS
        else:
            wrong = np.isfinite(theirs) != np.isfinite(ours)
        if wrong.any():
            where = tuple(np.argwhere(wrong)[0])
            yield Limit(values, name, _text(theirs[where]), _text(ours[where]))


def _text(value: Any) -> str:
    return f"{value:.4g}" if value.dtype.kind == "f" else str(value)


def finite(
    output: TensorSpec, expected: Array, actual: Array, case: ParityCase
) -> tuple[Array, Array]:
    """The finite values of both; edge inputs may have others, but the same of both.

    Raises:
        ValuesDiffer: a value is not finite.
    """
    finite = np.isfinite(expected)
    if finite.all() and np.isfinite(actual).all():
        return expected, actual
    where = f"output '{output.name}' at {case}"
    if not case.edges and not finite.all():
        raise ValuesDiffer(
            f"{where}: the model's values are not finite; narrow the signature's ranges to valid "
            "inputs, or correct the model",
            {},
        )
    wrong = np.isinf(Tolerance(0, 0).ratio(expected, actual)) & ~(finite & np.isfinite(actual))
    if wrong.any():
        ours, theirs = actual[wrong][0], expected[wrong][0]
        raise ValuesDiffer(
            f"{where}: the artifact's value is {ours:g}, the model's {theirs:g}, so that they are "
            "not finite alike; narrow the signature's ranges to valid inputs, or correct the model",
            case.inputs,
        )
    return expected[finite], actual[finite]


def check_neighbours(
    source: Source, case: ParityCase, expected: Arrays, tolerance: Tolerance
) -> int:
    """Answer each row of a batch beside other rows, and its last row alone.

    Args:
        expected: the answers to the whole batch.

    Returns:
        The number of rows whose answers are equal.

    Raises:
        Unsupported: an answer changes.
    """
    kept = 0
    # The parity of the bits (Thue-Morse) is alike neither in neighbouring nor in reversed rows.
    odd = np.array([row.bit_count() % 2 == 1 for row in range(case.batch)])
    for rows in (odd, ~odd):
        for inputs in _replaced(case, ~rows):
            try:
                found = source.reference(inputs)
            except ModelportError:
                raise
            except Exception:  # the model may not take the other rows
                continue
            for name, x in expected.items():
                if x.shape != found[name].shape or _differ(x[rows], found[name][rows], tolerance):
                    raise _depends(source, name, case.inputs, inputs, rows)
            kept += int(rows.sum())
            break
    alone = source.reference({name: x[-1:] for name, x in case.inputs.items()})
    gross = Tolerance(GROSS * tolerance.atol, GROSS * tolerance.rtol)
    for name, x in expected.items():
        if x.dtype.kind == "f" and _differ(x[-1:], alone[name], gross):  # ties may flip integers
            raise _depends(source, name, case.inputs, {}, rows)
    return kept


def _replaced(case: ParityCase, rows: Array) -> Iterator[Arrays]:
    """The inputs with other values in ``rows``: its neighbours, else those of the batch itself."""
    for others in (case.neighbours or {}, {n: np.roll(x, 1, 0) for n, x in case.inputs.items()}):
        if others:
            inputs = {name: x.copy() for name, x in case.inputs.items()}
            for name, x in inputs.items():
                x[rows] = others[name][rows]
            yield inputs


def _differ(expected: Array, found: Array, tolerance: Tolerance) -> bool:
    return expected.shape != found.shape or bool(tolerance.outside(expected, found).any())


def _depends(source: Source, name: str, inputs: Arrays, others: Arrays, rows: Array) -> Unsupported:
    operator = ""
    if source.diagnostics is not None and others:
        with contextlib.suppress(Exception):  # a module may not run under a dispatch mode
            operator = source.diagnostics.first_mixing(inputs, others, rows)
    where = f" ({operator})" if operator else ""
    return Unsupported(
        f"output '{name}' of a row changes with the other rows of its batch{where}, which a server "
        "fills with the rows of other requests; compute each row by itself, give "
        "--max-batch-size 1, or make the rows an axis: --max-batch-size 0, and "
        "'NAME:DATATYPE[rows=1..8,...]' for each --input"
    )
