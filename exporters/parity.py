"""Proof that an artifact computes what its checkpoint computes; anything less raises.

Both are run on the same seeded inputs: every batch size and axis size that matters, the corners of
every declared range, then random ones. The framework's eager mode is the reference.

In fp32 every value must lie within tolerance and every decision agree. Lower precisions change the
values by design, so what they are held to is ``Bounds``: the decisions they leave as they were, or,
for a model that declares no decision, the relative error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from modelport.exporters.formats import Session
from modelport.exporters.samples import corners, draw, name_axes, sizes_of
from modelport.exporters.source import Source
from modelport.exporters.spec import Decision, ModelSpec
from modelport.gateway.cli.errors import ParityError, UsageError, first_line
from modelport.gateway.errors import ModelportError
from modelport.gateway.types import NUMPY_DTYPES, Array, ModelSignature, TensorSpec

#: Samples by parameter count, so that a proof takes seconds for a small model and about a minute
#: for a large one. The first row that is large enough counts.
DEFAULT_SAMPLES = ((5_000_000, 1000), (200_000_000, 64))
FEWEST_SAMPLES = 16

#: Batch sizes that are always tried, besides the largest.
BATCH_SIZES = (1, 2, 8)

#: Edge inputs are tried at this many of the smallest batch sizes: an edge is about values.
EDGE_BATCHES = 2

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an artifact in less than fp32 must keep.

    Attributes:
        agreement: fraction of decisions that must be as the checkpoint's.
        relative_error: largest ``|error| / |reference|`` over all of an output's values (ratio of
            L2 norms), for a model that declares no decision.
    """

    agreement: float
    relative_error: float


#: By precision; fp32 is held to its tolerance instead.
BOUNDS: Mapping[str, Bounds] = {
    "fp16": Bounds(agreement=0.995, relative_error=0.01),
    "bf16": Bounds(agreement=0.98, relative_error=0.05),
    "int8": Bounds(agreement=0.97, relative_error=0.1),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One batch of inputs and where it lies in the plan; ``batch`` 0: the model does not batch."""

    batch: int
    sizes: Mapping[str, int]
    inputs: Mapping[str, Array]
    edge: bool = False

    def __str__(self) -> str:
        parts = [f"batch {self.batch}"] if self.batch else []
        parts += [f"{name} {size}" for name, size in self.sizes.items()]
        return ", ".join(parts) + (", edge input" if self.edge else "")


@dataclass(slots=True)
class OutputError:
    """How far one output was from the reference, over every value compared."""

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
    """What was tried and what came of it.

    ``undecided`` counts decisions so close that both answers lie within the tolerance: they are
    neither agreement nor disagreement.
    """

    seed: int
    atol: float
    rtol: float
    bounds: Bounds | None = None
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
    """How many random samples a proof takes unless told otherwise."""
    return next((n for most, n in DEFAULT_SAMPLES if parameter_count <= most), FEWEST_SAMPLES)


def check(
    source: Source,
    session: Session,
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
        samples: how many random samples at least; the grid of sizes and the edges always run.
        bounds: for an artifact in less than fp32; None holds it to the tolerance.
        progress: told the samples done and the total after each batch.

    Raises:
        ParityError: a name, shape, datatype or value differs, is not finite, or the runtime fails.
        Unsupported: the module returns something other than tensors.
    """
    signature, spec = source.signature, source.spec
    _check_names("input", signature.inputs, session.inputs)
    _check_names("output", signature.outputs, session.outputs)
    report = ParityReport(seed, atol, rtol, bounds, decision=spec.decision)
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
            _compare(output, expected[output.name], actual[output.name], case, report)
        _count(case, expected, actual, report, spec)
        progress(min(report.samples, samples), samples)
    _judge(report)
    return report


def rehearse(source: Source, seed: int) -> None:
    """Run the model alone over the grid and the edges.

    Raises:
        ParityError: it fails on inputs that its signature allows.
    """
    for case in plan(source.signature, source.spec, 0, seed):
        _reference(source, case)


def plan(signature: ModelSignature, spec: ModelSpec, samples: int, seed: int) -> Iterator[Case]:
    """The grid of batch and axis sizes, the edges, then random sizes up to ``samples``."""
    signature = name_axes(signature)
    rng = np.random.default_rng(seed)
    sample = spec.sample or draw
    largest = signature.max_batch_size
    batches = sorted({largest, *(b for b in BATCH_SIZES if b <= largest)}) if largest else [0]
    done = 0
    for sizes in _grid(signature):
        for batch in batches:
            yield Case(batch, sizes, sample(signature, batch, sizes, rng))
            done += batch or 1
    for sizes, fills in corners(signature):
        for batch in batches[:EDGE_BATCHES]:
            yield Case(batch, sizes, draw(signature, batch, sizes, rng, fills), edge=True)
    while done < samples:
        batch = batches[int(rng.integers(len(batches)))]
        sizes = {
            name: int(rng.integers(axis.minimum, sizes_of(axis)[-1], endpoint=True))
            for name, axis in signature.axes.items()
        }
        yield Case(batch, sizes, sample(signature, batch, sizes, rng))
        done += batch or 1


def _grid(signature: ModelSignature) -> list[dict[str, int]]:
    """All axes short, middle and long together; then each alone, the others at their middle."""
    tried = {name: sizes_of(axis) for name, axis in signature.axes.items()}
    middle = {name: sizes[len(sizes) // 2] for name, sizes in tried.items()}
    grid = [{name: sizes[pick] for name, sizes in tried.items()} for pick in (0, -1)]
    grid.append(middle)
    grid += [{**middle, name: size} for name, sizes in tried.items() for size in sizes]
    return [sizes for index, sizes in enumerate(grid) if sizes not in grid[:index]]


def _check_names(kind: str, declared: Sequence[TensorSpec], found: Sequence[str]) -> None:
    names = [spec.name for spec in declared]
    if sorted(names) != sorted(found):
        raise ParityError(
            f"the artifact's {kind}s are {', '.join(found) or 'none'}, the signature's are "
            f"{', '.join(names)}; every declared {kind} must be used, under its declared name"
        )


def _reference(source: Source, case: Case) -> dict[str, Array]:
    try:
        return source.reference(case.inputs)
    except ModelportError:
        raise
    except Exception as error:
        raise ParityError(
            f"the model itself fails at {case}: {type(error).__name__}: {error}; its signature "
            "must declare only what forward() accepts"
        ) from error


def _declared_shape(output: TensorSpec, case: Case) -> tuple[int, ...]:
    """The shape that the signature promises, -1 where it leaves a size open."""
    dims = output.dims if output.reshape is None else output.reshape
    shape = tuple(case.sizes.get(dim, -1) if isinstance(dim, str) else dim for dim in dims)
    return (case.batch, *shape) if case.batch else shape


def _compare(
    output: TensorSpec, expected: Array, actual: Array, case: Case, report: ParityReport
) -> None:
    where = f"output '{output.name}' at {case}"
    for kind, array in (("the model's", expected), ("the artifact's", actual)):
        if array.dtype != NUMPY_DTYPES[output.datatype]:
            raise ParityError(
                f"{where}: {kind} datatype is {array.dtype}, the signature says {output.datatype}; "
                "correct the signature or cast in forward()"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ParityError(
                f"{where}: {kind} values are not finite; narrow the signature's ranges to valid "
                "inputs, or correct the model"
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
    _tally(report, output.name, expected, actual, case)


def _tally(report: ParityReport, name: str, expected: Array, actual: Array, case: Case) -> None:
    if not expected.size:
        return
    total = report.outputs[name]
    reference = expected.astype(np.float64)
    error = np.abs(actual.astype(np.float64) - reference)
    if expected.dtype.kind == "f":
        # What is rounded to half precision may be rounded to the next number by another runtime.
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


def _count(
    case: Case,
    expected: Mapping[str, Array],
    actual: Mapping[str, Array],
    report: ParityReport,
    spec: ModelSpec,
) -> None:
    if case.edge:
        report.edge_samples += case.batch or 1
    else:
        report.samples += case.batch or 1
    if case.batch:
        report.batch_sizes.add(case.batch)
    for name, size in case.sizes.items():
        report.axis_sizes.setdefault(name, set()).add(size)
    decision = report.decision
    if decision is not None:
        reference = expected[decision.output]
        clear = ~_undecided(decision, reference, report, spec)
        same = decide(decision, reference) == decide(decision, actual[decision.output])
        report.decisions += int(clear.sum())
        report.decisions_agreeing += int((same & clear).sum())
        report.undecided += int((~clear).sum())


def decide(decision: Decision, values: Array) -> Array:
    """What ``values`` of the decision's output lead to: bool, or the index of the largest."""
    if decision.threshold is not None:
        return np.asarray(values >= decision.threshold)
    return np.asarray(values.argmax(axis=-1))


def _undecided(
    decision: Decision, reference: Array, report: ParityReport, spec: ModelSpec
) -> Array:
    """Where a value within tolerance of the reference would decide otherwise; fp32 only.

    A tolerance that was widened on the command line does not widen this one.
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
