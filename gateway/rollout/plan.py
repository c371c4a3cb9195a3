"""The plan of a rollout: what a person asked for, with its stages.

A plan never changes while its rollout runs. It is checked once, where it comes in, and travels
between processes and into the state as JSON (``to_json``, ``from_json``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

#: Most stages of a rollout.
MAX_STEPS = 100
#: Header, and gRPC metadata, with the key of a sticky assignment.
ROUTE_KEY = "x-modelport-route-key"


class AssignmentKind(StrEnum):
    """The ways to assign a request to a side."""

    #: Each request at random.
    REQUEST = "request"
    #: By the header or metadata ``x-modelport-route-key``.
    HEADER = "header"
    #: By a request parameter, ``RolloutPlan.parameter``.
    PARAMETER = "parameter"
    #: By the authenticated principal.
    PRINCIPAL = "principal"


class ComparisonKind(StrEnum):
    """The ways to compare two answers."""

    #: Values within tolerances: both sides compute the same checkpoint.
    VALUES = "values"
    #: Decisions (the largest class, the side of a threshold): the candidate was trained again.
    DECISIONS = "decisions"


class StageKind(StrEnum):
    """The kinds of a stage."""

    SHADOW = "shadow"
    CANARY = "canary"


class RolloutSide(NamedTuple):
    """The model and version that answer for one side. A route to another server is a model."""

    model: str
    version: int


class RolloutStage(NamedTuple):
    """One stage: the share of requests that are copied to, or answered by, the candidate."""

    kind: StageKind
    share: float


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of the candidate; None means no such criterion. They come from ``slo.toml``.

    A regression of 0.05 allows 5 % more than the baseline.
    """

    #: 1 - the probability that a candidate within every limit is rolled back.
    confidence: float = 0.95
    #: Share of compared answers that may disagree.
    max_disagreement: float | None = 0.001
    #: The candidate's errors, as a multiple of the baseline's.
    max_error_ratio: float | None = 1.5
    #: Share of the candidate's requests that may fail.
    max_error_share: float | None = None
    max_p50_regression: float | None = 0.05
    max_p99_regression: float | None = 0.05
    max_first_byte_p50_regression: float | None = None
    max_first_byte_p99_regression: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    #: The candidate's wrong decisions by later labels, as a multiple of the baseline's.
    max_quality_ratio: float | None = 1.1
    #: An answer agrees if ``|difference| <= atol + rtol * |baseline|``.
    atol: float = 0.0
    rtol: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """A rollout of ``candidate`` in place of ``baseline``, for requests to ``model``.

    ``to_json`` and ``from_json`` keep every field.
    """

    #: Identifies the rollout: 32 hexadecimal digits.
    id: str
    model: str
    baseline: RolloutSide
    candidate: RolloutSide
    #: The label that moves to the candidate at its promotion; empty: the default version.
    label: str = ""
    #: Share of requests copied in the shadow stage; 0: there is no shadow stage.
    shadow: float = 0.0
    #: Shares of the canary stages, growing.
    steps: tuple[float, ...] = (0.01, 0.05, 0.25, 1.0)
    #: Least requests that the candidate answers (that are compared, in shadow) in each stage.
    min_requests: int = 100
    #: Least and longest duration of each stage.
    min_seconds: float = 60.0
    max_seconds: float = 86_400.0
    assignment: AssignmentKind = AssignmentKind.REQUEST
    #: The parameter's name if the assignment is by a parameter.
    parameter: str = ""
    #: Whether the baseline also answers each request of a canary, to compare the answers.
    pair: bool = False
    #: Whether each stage waits for a person's ``promote``.
    manual: bool = False
    #: Whether the candidate stays loaded after a rollback.
    keep: bool = False
    #: Most disagreeing requests to keep for a person.
    keep_inputs: int = 10
    comparison: ComparisonKind = ComparisonKind.VALUES
    #: The output whose decisions are compared; empty: the largest class of every output.
    decision_output: str = ""
    #: The two sides of this value are the decisions; None: the largest class.
    decision_threshold: float | None = None
    #: The version for requests without a version. They are diverted only if it is the baseline's.
    default_version: int = 0
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    #: URLs that are called before each stage and after each decision.
    webhooks: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[RolloutStage, ...]:
        """The shadow stage, if any, and the canary stages."""
        shadow = (RolloutStage(StageKind.SHADOW, self.shadow),) if self.shadow else ()
        return (*shadow, *(RolloutStage(StageKind.CANARY, share) for share in self.steps))

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return dataclasses.asdict(self) | {
            "baseline": self.baseline._asdict(),
            "candidate": self.candidate._asdict(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RolloutPlan:
        """The plan of ``to_json``'s document."""
        return cls(
            **{
                **document,
                "baseline": RolloutSide(**document["baseline"]),
                "candidate": RolloutSide(**document["candidate"]),
                "steps": tuple(document["steps"]),
                "webhooks": tuple(document["webhooks"]),
                "assignment": AssignmentKind(document["assignment"]),
                "comparison": ComparisonKind(document["comparison"]),
                "limits": RolloutLimits(**document["limits"]),
            }
        )
