"""The result of a parity proof."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from modelport.exporters.model_spec import AttentionMask, Decision
from modelport.exporters.tolerance import Bounds


@dataclass(slots=True)
class OutputError:
    """Difference between one output and its reference, over every value compared.

    ``worst_ratio`` and ``squared_ratio`` are in units of the tolerance at each value.
    """

    max_abs_error: float = 0.0
    mean_abs_error: float = 0.0
    values: int = 0
    values_outside: int = 0
    worst_case: str = ""
    squared_error: float = 0.0
    squared_reference: float = 0.0
    worst_ratio: float = 0.0
    squared_ratio: float = 0.0

    @property
    def relative_error(self) -> float:
        """The L2 norm of the error over that of the reference."""
        if not self.squared_error:
            return 0.0
        return float(np.sqrt(self.squared_error / max(self.squared_reference, 1e-300)))

    @property
    def typical_ratio(self) -> float:
        """The root mean square of the error, in units of the tolerance."""
        return float(np.sqrt(self.squared_ratio / max(self.values, 1)))


@dataclass(frozen=True, slots=True)
class Conditioning:
    """The error that rounding alone causes in an output, in units of the tolerance.

    Attributes:
        measured: the variants of the model that were compared with it.
        worst, typical: the largest deviation of a variant, and its root mean square.
        factor: the artifact may deviate by this factor more than the variants.
        tolerance: the resulting factor on ``atol`` and ``rtol``.
        cap: the largest factor that is granted.
    """

    measured: str
    worst: float
    typical: float
    factor: float
    tolerance: float
    cap: float


@dataclass(frozen=True, slots=True)
class Limit:
    """A difference on values that no range excludes, at which the model itself has no number to
    give, or that are too large for a tolerance.

    Attributes:
        values: the kind of the input values.
        output: the output that differs.
        model, artifact: the first value that differs, as text; JSON has no NaN.
    """

    values: str
    output: str
    model: str
    artifact: str

    def __str__(self) -> str:
        return (
            f"inputs of {self.values}: output '{self.output}' is {self.model} of the model, "
            f"{self.artifact} of the artifact"
        )


@dataclass(slots=True)
class ParityReport:
    """The inputs that were tried and the differences that were found.

    ``undecided`` counts decisions so close that both answers lie within the tolerance: they are
    neither agreement nor disagreement. ``branched_samples`` counts samples that are right if the
    values that the model branches by move within the tolerance. ``conditioning`` has the outputs of
    a sensitive model whose tolerance is wider. ``edges`` counts the edge samples by the kind of
    their values, ``limits`` are the differences that are accepted beyond the ranges, and
    ``neighbours`` counts rows whose answers were equal beside other rows. ``ranges`` are those of
    integer inputs that nobody declared: the values that were tried, and that are served.
    """

    seed: int
    atol: float
    rtol: float
    bounds: Bounds | None = None
    masks: tuple[AttentionMask, ...] = ()
    samples: int = 0
    edges: Counter[str] = field(default_factory=Counter)
    limits: list[Limit] = field(default_factory=list)
    neighbours: int = 0
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    batch_sizes: set[int] = field(default_factory=set)
    axis_sizes: dict[str, set[int]] = field(default_factory=dict)
    outputs: dict[str, OutputError] = field(default_factory=dict)
    decision: Decision | None = None
    decisions: int = 0
    decisions_agreeing: int = 0
    undecided: int = 0
    branched_samples: int = 0
    conditioning: dict[str, Conditioning] = field(default_factory=dict)

    @property
    def edge_samples(self) -> int:
        return self.edges.total()

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
