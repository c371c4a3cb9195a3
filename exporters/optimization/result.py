"""Facts about an optimised graph that its certificate states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Time of the converted file over that of the optimised one, in one run.

    Attributes:
        batch: rows of a request; 0: the model does not batch.
        shapes: of its inputs, by name.
        seconds_before, seconds_after: medians of a request.
        ratio: median over the rounds; above 1 the optimised file is faster.
        low, high: the middle half of the rounds.
    """

    batch: int
    shapes: Mapping[str, tuple[int, ...]]
    rounds: int
    seconds_before: float
    seconds_after: float
    ratio: float
    low: float
    high: float


_FIGURES = ("seconds_before", "seconds_after", "ratio", "low", "high")


@dataclass(frozen=True, slots=True)
class GraphOptimization:
    """A graph before and after its optimisation.

    Attributes:
        model_type: the fusions of ONNX Runtime's transformer optimiser; None: none were applied.
        num_heads, hidden_size: as passed to it; 0: it looks for them in the graph.
        fused: occurrences of each operator of ONNX Runtime's own in the result.
        approximate: GELU is computed by an approximation.
        portable: every operator is of ONNX's own standard.
        speedup: one for each batch size that was measured.
    """

    size_bytes_before: int
    size_bytes_after: int
    operators_before: int
    operators_after: int
    portable: bool
    model_type: str | None = None
    num_heads: int = 0
    hidden_size: int = 0
    fused: Mapping[str, int] = field(default_factory=dict)
    approximate: bool = False
    speedup: tuple[SpeedUp, ...] = ()


def from_certificate(document: Mapping[str, Any]) -> GraphOptimization:
    """The facts in a certificate; raises ``LookupError``, ``TypeError`` or ``ValueError``."""
    sizes, counts = (
        ("size_bytes_before", "size_bytes_after"),
        ("operators_before", "operators_after"),
    )
    return GraphOptimization(
        **{name: int(document[name]) for name in (*sizes, *counts)},
        portable=bool(document["portable"]),
        model_type=None if document["model_type"] is None else str(document["model_type"]),
        num_heads=int(document["num_heads"]),
        hidden_size=int(document["hidden_size"]),
        fused={str(name): int(count) for name, count in document["fused"].items()},
        approximate=bool(document["approximate"]),
        speedup=tuple(
            SpeedUp(
                batch=int(one["batch"]),
                shapes={str(n): tuple(map(int, shape)) for n, shape in one["shapes"].items()},
                rounds=int(one["rounds"]),
                **{name: float(one[name]) for name in _FIGURES},
            )
            for one in document["speedup"]
        ),
    )
