"""Numerical proof that an artifact computes what its checkpoint computes.

Both run on the same seeded inputs: every relevant batch size and axis size, the corners of every
declared range, then random inputs. The framework's eager mode is the reference.

Values at positions that the spec's masks leave undefined are not compared.

In fp32 every value must lie within the tolerance and every decision must agree. Lower precisions
change values by design, so they are held to ``Bounds`` instead: agreement of decisions or, for a
model that declares no decision, the relative error. Anything else raises ``ParityError``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from modelport.exporters.formats import ParitySession
from modelport.exporters.loaded_model import Source
from modelport.exporters.model_spec import AttentionMask, Decision, ModelSpec
from modelport.exporters.proof.parity_cases import ParityCase, plan
from modelport.exporters.requests import attention_masks
from modelport.gateway.cli.errors import ParityError, UsageError, first_line
from modelport.gateway.errors import ModelportError
from modelport.gateway.types import NUMPY_DTYPES, Array, TensorSpec

#: Number of samples by parameter count: seconds for a small model, about a minute for a large one.
#: The first row that is large enough is used.
DEFAULT_SAMPLES = ((5_000_000, 1000), (200_000_000, 64))
FEWEST_SAMPLES = 16

Progress = Callable[[int, int], None]


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


#: Limits by precision. fp32 has a tolerance instead.
BOUNDS: Mapping[str, Bounds] = {
    "fp16": Bounds(agreement=0.995, relative_error=0.01),
    "bf16": Bounds(agreement=0.98, relative_error=0.05),
    "int8": Bounds(agreement=0.97, relative_error=0.1),
}


@dataclass(slots=True)
class OutputError:
    """Difference between one output and its reference, over every value compared."""

    max_abs_error: float = 0.0
    mean_abs_error: float = 0.0
    values: int = 0
    values_outside: int = 0
    worst_case: str = ""
    squared_error: float = 0.0
    squared_reference: float = 0.0

    @property
    def relative_error(self) -> float:
        """The L2 norm of the error over that of the reference."""
        if not self.squared_error:
            return 0.0
        return float(np.sqrt(self.squared_error / max(self.squared_reference, 1e-300)))


@dataclass(slots=True)
class ParityReport:
    """The inputs that were tried and the differences that were found.

    ``undecided`` counts decisions so close that both answers lie within the tolerance: they are
    neither agreement nor disagreement.
    """

    seed: int
    atol: float
    rtol: float
    bounds: Bounds | None = None
    masks: tuple[AttentionMask, ...] = ()
    samples: int = 0
    edge_samples: int = 0
    batch_sizes: set[int] = field(default_factory=set)
    axis_sizes: dict[str, set[int]] = field(default_factory=dict)
    outputs: dict[str, OutputError] = field(default_factory=dict)
    decision: Decision | None = None
    decisions: int = 0
    decisions_agreeing: int = 0
    undecided: int = 0

    @property
    def agreement(self) -> float | None:
        """Fraction of decisions on which both agree; None where nothing is decided."""
        return self.decisions_agreeing / self.decisions if self.decisions else None

    @property
    def max_abs_error(self) -> float:
        return max((output.max_abs_error for output in self.outputs.values()), default=0.0)

    @property
    def mean_abs_error(self) -> float:
        return max((output.mean_abs_error for output in self.outputs.values()), default=0.0)


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
        progress: called with the samples done and the total after each batch.

    Raises:
        ParityError: a name, shape, datatype or value differs, is not finite, or the runtime fails.
        Unsupported: the module returns something other than tensors.
    """
    signature, spec = source.signature, source.spec
    _check_names("input", signature.inputs, session.inputs)
    _check_names("output", signature.outputs, session.outputs)
    report = ParityReport(seed, atol, rtol, bounds, spec.masks, decision=spec.decision)
    report.outputs = {output.name: OutputError() for output in signature.outputs}
    if spec.decision and spec.decision.output not in report.outputs:
        raise UsageError(
            f"the decision of model '{spec.name}' names output '{spec.decision.output}', "
            "which its signature lacks; correct its ModelSpec"
        )
    for case in plan(signature, spec, samples, seed):
        expected = _reference(source, case)
        try:
            actual = session(case.inputs)
        except Exception as error:
            reason = first_line(error)
            raise ParityError(
                f"the artifact fails at {case}: {reason}; a dimension is baked in or an operator "
                "is converted wrongly"
            ) from error
        for output in signature.outputs:
            theirs, ours = expected[output.name], actual[output.name]
            where = attention_masks.defined(
                signature, spec.masks, output, case.inputs, theirs.shape
            )
            _compare(output, theirs, ours, where, case, report)
            if spec.decision and output.name == spec.decision.output:
                _count_decisions(spec.decision, theirs, ours, where, report, spec)
        _count(case, report)
        progress(min(report.samples, samples), samples)
    _judge(report)
    return report


def rehearse(source: Source, seed: int) -> None:
    """Run the model alone over the grid of sizes and the edges.

    Raises:
        ParityError: the model fails on inputs that its signature allows.
    """
    for case in plan(source.signature, source.spec, 0, seed):
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
            f"the model itself fails at {case}: {type(error).__name__}: {error}; its signature "
            "must declare only what forward() accepts"
        ) from error


def _declared_shape(output: TensorSpec, case: ParityCase) -> tuple[int, ...]:
    """The shape that the signature declares, with -1 for open sizes."""
    dims = output.dims if output.reshape is None else output.reshape
    shape = tuple(case.sizes.get(dim, -1) if isinstance(dim, str) else dim for dim in dims)
    return (case.batch, *shape) if case.batch else shape


def _compare(
    output: TensorSpec,
    expected: Array,
    actual: Array,
    defined: Array | None,
    case: ParityCase,
    report: ParityReport,
) -> None:
    """Add the differences of one output to ``report``; ``defined`` None: all values are."""
    where = f"output '{output.name}' at {case}"
    for kind, array in (("the model's", expected), ("the artifact's", actual)):
        if array.dtype != NUMPY_DTYPES[output.datatype]:
            raise ParityError(
                f"{where}: {kind} datatype is {array.dtype}, the signature says {output.datatype}; "
                "correct the signature or cast in forward()"
            )
    declared = _declared_shape(output, case)
    kept = len(declared) == expected.ndim and all(
        promised in (-1, size) for promised, size in zip(declared, expected.shape, strict=True)
    )
    if not kept or actual.shape != expected.shape:
        raise ParityError(
            f"{where}: the artifact gives {list(actual.shape)}, the model {list(expected.shape)}, "
            f"the signature {list(declared)}; a dimension is baked in or misdeclared"
        )
    if defined is not None:
        expected, actual = expected[defined], actual[defined]
    for kind, array in (("the model's", expected), ("the artifact's", actual)):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ParityError(
                f"{where}: {kind} values are not finite; narrow the signature's ranges to valid "
                "inputs, or correct the model"
            )
    _tally(report, output.name, expected, actual, case)


def _tally(
    report: ParityReport, name: str, expected: Array, actual: Array, case: ParityCase
) -> None:
    if not expected.size:
        return
    total = report.outputs[name]
    reference = expected.astype(np.float64)
    error = np.abs(actual.astype(np.float64) - reference)
    if expected.dtype.kind == "f":
        # Another runtime may round to the neighbouring half-precision number.
        coarse = float(np.finfo(expected.dtype).eps) if expected.dtype.itemsize < 4 else 0.0
        outside = error > report.atol + max(report.rtol, coarse) * np.abs(reference)
    else:
        outside = actual != expected
    worst = float(error.max())
    if worst > total.max_abs_error:
        total.max_abs_error, total.worst_case = worst, str(case)
    total.values += error.size
    total.mean_abs_error += (float(error.mean()) - total.mean_abs_error) * error.size / total.values
    total.values_outside += int(outside.sum())
    total.squared_error += float((error**2).sum())
    total.squared_reference += float((reference**2).sum())


def _count(case: ParityCase, report: ParityReport) -> None:
    if case.edge:
        report.edge_samples += case.batch or 1
    else:
        report.samples += case.batch or 1
    if case.batch:
        report.batch_sizes.add(case.batch)
    for name, size in case.sizes.items():
        report.axis_sizes.setdefault(name, set()).add(size)


def _count_decisions(
    decision: Decision,
    expected: Array,
    actual: Array,
    defined: Array | None,
    report: ParityReport,
    spec: ModelSpec,
) -> None:
    undecided = _undecided(decision, expected, report, spec)
    same = decide(decision, expected) == decide(decision, actual)
    if defined is not None:
        whole = defined_decisions(decision, defined)
        undecided, same = undecided[whole], same[whole]
    report.decisions += int((~undecided).sum())
    report.decisions_agreeing += int((same & ~undecided).sum())
    report.undecided += int(undecided.sum())


def defined_decisions(decision: Decision, defined: Array) -> Array:
    """The decisions whose values are all defined."""
    return defined if decision.threshold is not None else np.asarray(defined.all(axis=-1))


def decide(decision: Decision, values: Array) -> Array:
    """The decisions that ``values`` lead to: bool, or the index of the largest."""
    if decision.threshold is not None:
        return np.asarray(values >= decision.threshold)
    return np.asarray(values.argmax(axis=-1))


def _undecided(
    decision: Decision, reference: Array, report: ParityReport, spec: ModelSpec
) -> Array:
    """Mask of decisions that another value within tolerance would reverse; fp32 only.

    A tolerance widened on the command line does not widen this one.
    """
    if report.bounds is not None:
        return np.zeros(decide(decision, reference).shape, bool)
    if decision.threshold is not None:
        margin, size = np.abs(reference - decision.threshold), np.abs(reference)
    elif reference.shape[-1] < 2:
        return np.zeros(reference.shape[:-1], bool)
    else:
        second, first = np.moveaxis(np.partition(reference, -2, axis=-1)[..., -2:], -1, 0)
        margin, size = (first - second) / 2, np.maximum(np.abs(first), np.abs(second))
    atol, rtol = min(report.atol, spec.atol), min(report.rtol, spec.rtol)
    return np.asarray(margin <= atol + rtol * size)


def _judge(report: ParityReport) -> None:
    if report.bounds is None:
        _judge_values(report)
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


def _judge_values(report: ParityReport) -> None:
    tolerance = f"{report.atol:g} + {report.rtol:g} * |reference|"
    for name, total in report.outputs.items():
        if total.values_outside:
            raise ParityError(
                f"output '{name}' differs from the checkpoint's by up to {total.max_abs_error:.3g} "
                f"({total.worst_case}), tolerance {tolerance}, {total.values_outside} of "
                f"{total.values} values outside; correct the model, or "
                "widen --atol and --rtol if that is acceptable"
            )


def _judge_relative_error(report: ParityReport, most: float) -> None:
    for name, total in report.outputs.items():
        if total.relative_error > most:
            raise ParityError(
                f"output '{name}' differs from the checkpoint's by {total.relative_error:.2%} "
                f"(ratio of L2 norms), bound {most:.2%}; raise "
                "--max-relative-error, or keep a higher precision"
            )
