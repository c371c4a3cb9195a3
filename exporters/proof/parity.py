"""Numerical proof that an artifact computes what its checkpoint computes.

Both run on the same seeded inputs: every relevant batch size and axis size, the corners of every
declared range, then random inputs. The framework's eager mode is the reference.

Values at positions that the spec's masks leave undefined are not compared.

In fp32 every value must lie within the tolerance and every decision must agree. Lower precisions
change values by design, so they are held to ``Bounds`` instead: agreement of decisions or, for a
model that declares no decision, the relative error. Anything else raises ``ParityError``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from modelport.exporters.errors import ParityError
from modelport.exporters.formats.base import ParitySession
from modelport.exporters.loaded_model import Source
from modelport.exporters.proof import branch_points, conditioning, decisions, edges, ranges
from modelport.exporters.proof.edges import ValuesDiffer
from modelport.exporters.proof.memory_forecast import MemoryForecast
from modelport.exporters.proof.parity_cases import ParityCase, plan
from modelport.exporters.proof.parity_report import OutputError, ParityReport
from modelport.exporters.requests import attention_masks
from modelport.exporters.tolerance import Bounds, Tolerance, pieces
from modelport.gateway.errors import ModelportError, UsageError, first_line
from modelport.gateway.types import NUMPY_DTYPES, Array, TensorSpec

#: Number of samples by parameter count: seconds for a small model, about a minute for a large one.
#: The first row that is large enough is used.
DEFAULT_SAMPLES = ((5_000_000, 1000), (200_000_000, 64))
FEWEST_SAMPLES = 16
#: Batches whose differences no branch point explains, after which no more are looked into.
MOST_UNEXPLAINED = 10

Progress = Callable[[int, int], None]


def default_samples(parameter_count: int) -> int:
    """Default number of random samples in a proof."""
    return next((n for most, n in DEFAULT_SAMPLES if parameter_count <= most), FEWEST_SAMPLES)


def check(
    source: Source,
    session: ParitySession,
    *,
    samples: int,
    seed: int,
    atol: float,
    rtol: float,
    bounds: Bounds | None = None,
    progress: Progress = lambda done, total: None,
) -> ParityReport:
    """Compare ``session`` with ``source``.

    Args:
        samples: minimum number of random samples; the grid of sizes and the edges always run.
        bounds: limits for a precision below fp32; None applies the tolerance.
        progress: called after each batch with the input elements done and the total.

    Raises:
        ParityError: a name, shape, datatype or value differs, is not finite, or the runtime fails.
        Unsupported: the module returns something other than tensors.
    """
    _check_names("input", source.signature.inputs, session.inputs)
    _check_names("output", source.signature.outputs, session.outputs)
    source = ranges.agreeing(source, session, seed, None if bounds else Tolerance(atol, rtol))
    signature, spec = source.signature, source.spec
    report = ParityReport(seed, atol, rtol, bounds, spec.masks, decision=spec.decision)
    report.ranges = ranges.of(source)
    report.outputs = {output.name: OutputError() for output in signature.outputs}
    if spec.decision and spec.decision.output not in report.outputs:
        raise UsageError(
            f"the decision of model '{spec.name}' names output '{spec.decision.output}', "
            "which its signature lacks; correct its ModelSpec"
        )
    worst, memory = _WorstCases(), MemoryForecast()
    for case in plan(signature, spec, samples, seed):
        if case.beyond:
            edges.compare_beyond(source, session, case, report)
        else:
            memory.begin(case)
            _check_case(source, session, case, report, worst)
            memory.end(case)
        progress(*case.work)
    if bounds is None:
        rounded = (case for case in plan(signature, spec, 0, seed) if not case.beyond)
        _condition(source, report, worst, rounded)
    _judge(report, worst)
    return report


class _WorstCases(dict[str, ParityCase]):
    """For each output, the case with the largest error; and the number of unexplained batches."""

    unexplained = 0


def _check_case(
    source: Source,
    session: ParitySession,
    case: ParityCase,
    report: ParityReport,
    worst: _WorstCases,
) -> None:
    """Run the model and the artifact on one batch, and add their differences to ``report``."""
    signature, spec = source.signature, source.spec
    expected = _reference(source, case)
    actual = _answer(session, case)
    compared: dict[str, Array | None] = {}
    for output in signature.outputs:
        _check_form(output, expected[output.name], actual[output.name], case)
        compared[output.name] = attention_masks.defined(
            signature, spec.masks, output, case.inputs, expected[output.name].shape
        )
    if case.edges and case.batch > 1:
        own = Tolerance(min(report.atol, spec.atol), min(report.rtol, spec.rtol))
        report.neighbours += edges.check_neighbours(source, case, expected, own)
    if report.bounds is None:
        _leave_out_branches(source, case, expected, actual, compared, report, worst)
    for output in signature.outputs:
        name = output.name
        before = report.outputs[name].worst_ratio
        _compare(output, expected[name], actual[name], compared[name], case, report)
        if report.outputs[name].worst_ratio > before:
            worst[name] = case
        if spec.decision and name == spec.decision.output:
            decisions.count(
                spec.decision, expected[name], actual[name], compared[name], report, spec
            )
    _count(case, report)


def _leave_out_branches(
    source: Source,
    case: ParityCase,
    expected: Mapping[str, Array],
    actual: Mapping[str, Array],
    compared: dict[str, Array | None],
    report: ParityReport,
    worst: _WorstCases,
) -> None:
    """Take values out of ``compared`` that differ because a tie or a threshold went the other way.

    A tolerance widened on the command line does not widen ties.
    """
    tolerance, spec = _tolerance(report), source.spec
    outside = {
        name: tolerance.outside(expected[name], actual[name]) & (True if c is None else c)
        for name, c in compared.items()
    }
    differs = any(where.any() for where in outside.values())
    if not differs or source.diagnostics is None or worst.unexplained >= MOST_UNEXPLAINED:
        return
    try:
        right = branch_points.accepted(
            source.diagnostics,
            tolerance,
            Tolerance(min(report.atol, spec.atol), min(report.rtol, spec.rtol)),
            case.inputs,
            expected,
            actual,
            outside,
            case.batch,
        )
    except Exception:  # a module may not run under a dispatch mode: nothing is forgiven then
        worst.unexplained = MOST_UNEXPLAINED
        return
    worst.unexplained += any(where.any() for where in outside.values())
    report.branched_samples += _rows(right, case.batch)
    for name, where in right.items():
        if where.any():
            c = compared[name]
            compared[name] = ~where if c is None else c & ~where


def _rows(right: Mapping[str, Array], batch: int) -> int:
    """The rows of a batch with a value that is right because of a branch point."""
    if not batch:
        return int(any(where.any() for where in right.values()))
    return int(sum(any(where[row].any() for where in right.values()) for row in range(batch)))


def _tolerance(report: ParityReport) -> Tolerance:
    return Tolerance(report.atol, report.rtol)


def _answer(session: ParitySession, case: ParityCase) -> dict[str, Array]:
    try:
        return session(case.inputs)
    except Exception as error:
        reason = first_line(error)
        raise ParityError(
            f"the artifact fails at {case}: {reason}; a dimension is baked in or an operator "
            "is converted wrongly"
        ) from error


def rehearse(source: Source, seed: int) -> None:
    """Run the model alone over the grid of sizes and the edges.

    Raises:
        ParityError: the model fails on inputs that its signature allows.
    """
    for case in plan(source.signature, source.spec, 0, seed):
        if not case.beyond:
            _reference(source, case)


def _check_names(kind: str, declared: Sequence[TensorSpec], found: Sequence[str]) -> None:
    names = [spec.name for spec in declared]
    if sorted(names) != sorted(found):
        raise ParityError(
            f"the artifact's {kind}s are {', '.join(found) or 'none'}, the signature's are "
            f"{', '.join(names)}; every declared {kind} must be used, under its declared name"
        )


def _reference(source: Source, case: ParityCase) -> dict[str, Array]:
    try:
        return source.reference(case.inputs)
    except ModelportError:
        raise
    except Exception as error:
        raise ParityError(
            f"the model itself fails at {case}: {type(error).__name__}: {first_line(error)}; "
            "declare only sizes and values that it accepts, with --input or in its ModelSpec"
        ) from error


def _check_form(output: TensorSpec, expected: Array, actual: Array, case: ParityCase) -> None:
    """Refuse another datatype or shape than the signature's."""
    where = f"output '{output.name}' at {case}"
    for kind, array in (("the model's", expected), ("the artifact's", actual)):
        if array.dtype != NUMPY_DTYPES[output.datatype]:
            raise ParityError(
                f"{where}: {kind} datatype is {array.dtype}, the signature says {output.datatype}; "
                "correct the signature or cast in forward()"
            )
    # The shape that the signature declares, with -1 for open sizes.
    dims = output.dims if output.reshape is None else output.reshape
    shape = tuple(case.sizes.get(dim, -1) if isinstance(dim, str) else dim for dim in dims)
    declared = (case.batch, *shape) if case.batch else shape
    kept = len(declared) == expected.ndim and all(
        promised in (-1, size) for promised, size in zip(declared, expected.shape, strict=True)
    )
    if not kept or actual.shape != expected.shape:
        raise ValuesDiffer(
            f"{where}: the artifact gives {list(actual.shape)}, the model {list(expected.shape)}, "
            f"the signature {list(declared)}; a dimension is baked in or misdeclared",
            case.inputs,
        )


def _compare(
    output: TensorSpec,
    expected: Array,
    actual: Array,
    compared: Array | None,
    case: ParityCase,
    report: ParityReport,
) -> None:
    """Add the differences of one output to ``report``; ``compared`` None: all values count."""
    if compared is not None:
        expected, actual = expected[compared], actual[compared]
    if expected.dtype.kind == "f":
        expected, actual = edges.finite(output, expected, actual, case)
    for _, theirs, ours in pieces(expected, actual):
        _tally(report.outputs[output.name], theirs, ours, case, _tolerance(report))


def _tally(
    total: OutputError, expected: Array, actual: Array, case: ParityCase, tolerance: Tolerance
) -> None:
    if expected.dtype.kind == "O":  # a text differs by one from every other
        expected, actual = np.zeros(expected.shape, bool), actual != expected
    reference = expected.astype(np.float64)
    error = np.abs(actual.astype(np.float64) - reference)
    ratio = tolerance.ratio(expected, actual)
    worst = float(error.max())
    if worst > total.max_abs_error:
        total.max_abs_error, total.worst_case = worst, str(case)
    total.values += error.size
    total.mean_abs_error += (float(error.mean()) - total.mean_abs_error) * error.size / total.values
    total.values_outside += int((ratio > 1).sum())
    total.squared_error += float((error**2).sum())
    total.squared_reference += float((reference**2).sum())
    total.worst_ratio = max(total.worst_ratio, float(ratio.max()))
    total.squared_ratio += float((ratio**2).sum())


def _count(case: ParityCase, report: ParityReport) -> None:
    if case.edges:
        report.edges.update(case.kinds)
    else:
        report.samples += case.batch or 1
    if case.batch:
        report.batch_sizes.add(case.batch)
    for name, size in case.sizes.items():
        report.axis_sizes.setdefault(name, set()).add(size)


def _condition(
    source: Source,
    report: ParityReport,
    worst: Mapping[str, ParityCase],
    cases: Iterator[ParityCase],
) -> None:
    """Widen the tolerance of outputs in which rounding alone makes the difference."""
    wrong = {name for name, total in report.outputs.items() if total.values_outside}
    if not wrong:
        return
    chosen = itertools.chain((worst[name] for name in wrong if name in worst), cases)
    report.conditioning = {
        name: found
        for name, found in conditioning.measure(source, chosen, _tolerance(report)).items()
        if name in wrong and found.worst > 1
    }


def _judge(report: ParityReport, worst: Mapping[str, ParityCase]) -> None:
    if report.bounds is None:
        _judge_values(report, worst)
        least = report.decision.minimum_agreement if report.decision else 0.0
    elif report.decision is None:
        _judge_relative_error(report, report.bounds.relative_error)
        return
    else:
        least = report.bounds.agreement
    if report.decision is not None and report.agreement is not None and report.agreement < least:
        raise ParityError(
            f"output '{report.decision.output}': decisions agree on {report.agreement:.2%} of "
            f"{report.decisions}, below {least:.2%}; "
            + (
                "lower --min-agreement, or keep a higher precision"
                if report.bounds
                else "tighten --atol and correct the model"
            )
        )


def _judge_values(report: ParityReport, worst: Mapping[str, ParityCase]) -> None:
    for name, total in report.outputs.items():
        found = report.conditioning.get(name)
        if not total.values_outside or conditioning.excuses(found, total):
            continue
        sensitive = ""
        if found is not None:
            sensitive = (
                f"; rounding alone ({found.measured}) moves the model by {found.worst:.3g} times "
                f"that, at most {found.tolerance:.3g} times are accepted, and the artifact is off "
                f"by {total.worst_ratio:.3g} times"
            )
        raise ValuesDiffer(
            f"output '{name}' differs from the checkpoint's by up to {total.max_abs_error:.3g} "
            f"({total.worst_case}), tolerance {_tolerance(report)}, {total.values_outside} of "
            f"{total.values} values outside{sensitive}; correct the model, or widen --atol and "
            "--rtol if that is acceptable",
            worst[name].inputs,
        )


def _judge_relative_error(report: ParityReport, most: float) -> None:
    for name, total in report.outputs.items():
        if total.relative_error > most:
            raise ParityError(
                f"output '{name}' differs from the checkpoint's by {total.relative_error:.2%} "
                f"(ratio of L2 norms), bound {most:.2%}; raise "
                "--max-relative-error, or keep a higher precision"
            )
