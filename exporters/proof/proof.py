"""Write one artifact and prove it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from modelport.exporters.formats.base import ExportTarget, ParitySession
from modelport.exporters.formats.registry import Format
from modelport.exporters.loaded_model import Source
from modelport.exporters.optimization.result import GraphOptimization
from modelport.exporters.proof import evaluation, parity
from modelport.exporters.proof.evaluation import Evaluation, HeldOut
from modelport.exporters.proof.parity_report import ParityReport
from modelport.exporters.runtime.resource_usage import Usage, measured
from modelport.exporters.tolerance import APPROXIMATE, BOUNDS, Bounds
from modelport.gateway.errors import Unsupported

#: Called with the stage's name, the amount done and the total; 0 of 0 means unknown.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Checks:
    """Limits that an artifact is held to; None uses the default of the spec or the precision.

    Attributes:
        agreement, relative_error: replace ``tolerance.BOUNDS`` below fp32.
        max_drop: accepted loss of accuracy or AUC on ``data``.
    """

    samples: int | None = None
    seed: int = 0
    atol: float | None = None
    rtol: float | None = None
    agreement: float | None = None
    relative_error: float | None = None
    data: HeldOut | None = None
    max_drop: float = evaluation.DEFAULT_MAX_DROP


@dataclass(frozen=True, slots=True)
class Proof:
    """The results of a proof, the resources that writing the artifact took, and how its graph was
    optimised."""

    report: ParityReport
    evaluation: Evaluation | None
    usage: Usage
    optimization: GraphOptimization | None = None


def convert(source: Source, row: Format, target: ExportTarget, path: Path, checks: Checks) -> Usage:
    """Write the artifact to ``path``.

    Raises:
        Unsupported: the converter refuses.
        ParityError: the model itself cannot run.
    """
    with measured() as usage:
        try:
            row.export(source, path, target)
        except Unsupported:
            # Converters blame their operators even if the model itself cannot run.
            parity.rehearse(source, checks.seed)
            raise
    return usage


def prove(
    source: Source, session: ParitySession, precision: str, checks: Checks, progress: Progress
) -> tuple[ParityReport, Evaluation | None]:
    """Compare an opened artifact with its source; raise ``ParityError`` if they differ.

    Below fp32, held-out data decides instead of random inputs, if it is given.
    """
    spec, bounds = source.spec, _bounds(precision, checks)
    unbound = Bounds(agreement=0.0, relative_error=float("inf"))
    report = parity.check(
        source,
        session,
        samples=checks.samples or parity.default_samples(source.parameter_count),
        seed=checks.seed,
        atol=spec.atol if checks.atol is None else checks.atol,
        rtol=spec.rtol if checks.rtol is None else checks.rtol,
        bounds=unbound if bounds and checks.data else bounds,
        progress=lambda done, total: progress("proving", done, total),
    )
    report.bounds = bounds
    if checks.data is None:
        return report, None
    found = evaluation.evaluate(
        source,
        session,
        checks.data,
        bounds,
        checks.max_drop,
        progress=lambda done, total: progress("evaluating", done, total),
    )
    return report, found


def held_to(target: ExportTarget, optimization: GraphOptimization | None) -> str:
    """The key of ``BOUNDS`` for an artifact; none where it must keep every value."""
    approximate = optimization is not None and optimization.approximate
    return APPROXIMATE if approximate and target.precision == "fp32" else target.precision


def _bounds(precision: str, checks: Checks) -> Bounds | None:
    if precision not in BOUNDS:
        return None
    default = BOUNDS[precision]
    return Bounds(
        default.agreement if checks.agreement is None else checks.agreement,
        default.relative_error if checks.relative_error is None else checks.relative_error,
    )
