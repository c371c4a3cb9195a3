"""The plan of a rollout: what a person asked for, with its stages.

A plan never changes while its rollout runs. It is checked once, where it comes in, and travels
between processes and into the state as JSON (``to_json``, ``from_json``).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import orjson

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository.scan import MAX_VERSION, is_model_name
from modelport.gateway.repository.version_choice import LABEL_NAME
from modelport.gateway.runtime import checked_json
from modelport.gateway.runtime.checked_json import STRICT

#: Most stages of a rollout.
MAX_STEPS = 100
MAX_KEEP_INPUTS = 1000
MAX_WEBHOOKS = 10
MAX_REQUESTS = 10**12
LEAST_POWER, MOST_POWER = 0.5, 0.999
MAX_TEXT = 1000
#: Largest ratio to the baseline that can be allowed.
MAX_RATIO = 1000.0
#: Limits that are shares.
_SHARES = (
    "max_disagreement", "max_invalid", "max_error_share", "max_class_changes", "max_class_shift",
    "max_score_shift",
)  # fmt: skip
ROLLOUT_ID = re.compile(r"[0-9a-f]{32}\Z")
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

    def __str__(self) -> str:
        """For people: ``shadow 10 %``."""
        return f"{self.kind} {100 * self.share:.4g} %"


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of the candidate; None means no such criterion. They come from ``slo.toml``.

    A regression of 0.05 allows 5 % more than the baseline.
    """

    __pydantic_config__: ClassVar = STRICT

    #: 1 - the probability that a candidate within every limit is rolled back.
    confidence: float = 0.95
    #: Share of compared answers that may disagree.
    max_disagreement: float | None = 0.001
    #: Share of compared answers with a missing, misshapen or non-finite output.
    max_invalid: float | None = 0.001
    #: The candidate's errors, as a multiple of the baseline's.
    max_error_ratio: float | None = 1.5
    #: Share of the candidate's requests that may fail.
    max_error_share: float | None = None
    max_p50_regression: float | None = 0.05
    max_p99_regression: float | None = 0.05
    max_first_byte_p50_regression: float | None = None
    max_first_byte_p99_regression: float | None = None
    #: A smaller difference in milliseconds is not a regression: the fewer requests a model version
    #: gets, the less of it stays in the processor's caches, which makes even the same one slower.
    min_regression_ms: float = 0.5
    p50_ms: float | None = None
    p99_ms: float | None = None
    #: The candidate's wrong decisions by later labels, as a multiple of the baseline's.
    max_quality_ratio: float | None = 1.1
    #: Of a retrained candidate: share of a class's decisions that may become others, share of the
    #: decisions that one class may gain or lose, and share of the scores that may move by a tenth
    #: of their range in one direction.
    max_class_changes: float | None = 0.4
    max_class_shift: float | None = 0.05
    max_score_shift: float | None = 0.1
    #: An answer agrees if ``|difference| <= atol + rtol * |baseline|``.
    atol: float = 0.0
    rtol: float = 0.0

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value is not None and value < 0:
                raise InvalidArgument(f"{each.name} must not be negative")
        if not 0 < self.confidence < 1:
            raise InvalidArgument("confidence must be between 0 and 1")
        for name in _SHARES:
            if not 0 <= (getattr(self, name) or 0) < 1:
                raise InvalidArgument(f"{name} is a share; it must be less than 1")
        for name in ("max_error_ratio", "max_quality_ratio"):
            if (getattr(self, name) or 0) > MAX_RATIO:
                raise InvalidArgument(f"{name} must not exceed {MAX_RATIO:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutChoices:
    """The fields that a plan takes unchanged from a person's request."""

    __pydantic_config__: ClassVar = STRICT

    #: The label that moves to the candidate at its promotion; empty: the default version.
    label: str = ""
    #: Share of requests copied in the shadow stage; 0: there is no shadow stage.
    shadow: float = 0.0
    #: Shares of the canary stages, growing.
    steps: tuple[float, ...] = (0.01, 0.05, 0.25, 1.0)
    #: Least requests that the candidate answers (that are compared, in shadow) in each stage.
    min_requests: int = 100
    #: Probability with which a stage, before it ends, must have found the harm that it is meant to
    #: find; 0: a stage ends with its least requests and time.
    power: float = 0.95
    #: Least and longest duration of each stage.
    min_seconds: float = 60.0
    max_seconds: float = 86_400.0
    #: Share of all requests that both sides answer in the canary stages, to compare the answers:
    #: at most each of the candidate's.
    pair: float | bool = 0.1
    #: Whether each stage waits for a person's ``promote``.
    manual: bool = False
    #: Whether the candidate stays loaded after a rollback.
    keep: bool = False
    #: Most disagreeing requests to keep for a person.
    keep_inputs: int = 10
    #: The output whose decisions are compared; empty: the largest class of every output.
    decision_output: str = ""
    #: The two sides of this value are the decisions; None: the largest class.
    decision_threshold: float | None = None
    #: The number of largest classes whose set is the decision.
    decision_top_k: int = 1
    #: URLs that are called before each stage and after each decision.
    webhooks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutPlan(RolloutChoices):
    """A rollout of ``candidate`` in place of ``baseline``, for requests to ``model``.

    ``to_json`` and ``from_json`` keep every field. Nothing but a plan that can be carried out can
    be constructed.

    Raises:
        InvalidArgument: a field is out of its range, or contradicts another.
    """

    __pydantic_config__: ClassVar = STRICT

    #: Identifies the rollout: 32 hexadecimal digits.
    id: str
    model: str
    baseline: RolloutSide
    candidate: RolloutSide
    assignment: AssignmentKind = AssignmentKind.REQUEST
    #: The parameter's name if the assignment is by a parameter.
    parameter: str = ""
    comparison: ComparisonKind = ComparisonKind.VALUES
    #: The version for requests without a version. They are diverted only if it is the baseline's.
    default_version: int = 0
    limits: RolloutLimits = field(default_factory=RolloutLimits)

    def __post_init__(self) -> None:
        self._check_sides()
        # Older plans have a truth value: every request of the candidate, or none.
        object.__setattr__(self, "pair", float(self.pair))
        if not 0 <= self.shadow <= 1:
            raise InvalidArgument(f"shadow is {self.shadow:.10g}; it must be between 0 and 100 %")
        if not 0 <= self.pair <= 1:
            raise InvalidArgument(f"pair is {self.pair:.10g}; it must be between 0 and 100 %")
        if self.power and not LEAST_POWER <= self.power <= MOST_POWER:
            raise InvalidArgument(
                f"power is {self.power:.10g}; it must be 0, or {LEAST_POWER:g} to {MOST_POWER:g}"
            )
        if not 1 <= len(self.steps) <= MAX_STEPS:
            raise InvalidArgument(
                f"a rollout must have 1 to {MAX_STEPS} steps, not {len(self.steps)}"
            )
        for before, step in itertools.pairwise((0.0, *self.steps)):
            if not before < step <= 1:
                raise InvalidArgument(
                    f"steps must increase, up to 100 % at most; {step:.6%} comes after {before:.6%}"
                )
        if not 1 <= self.min_requests <= MAX_REQUESTS:
            raise InvalidArgument(f"min_requests must be between 1 and {MAX_REQUESTS:,}")
        if not 0 <= self.min_seconds <= self.max_seconds or not self.max_seconds:
            raise InvalidArgument("min_seconds must not be negative, nor more than max_seconds")
        if (self.assignment is AssignmentKind.PARAMETER) != bool(self.parameter):
            raise InvalidArgument(
                "only an assignment by a parameter has, and needs, the parameter's name"
            )
        if not 0 <= self.keep_inputs <= MAX_KEEP_INPUTS:
            raise InvalidArgument(f"keep_inputs must be between 0 and {MAX_KEEP_INPUTS}")
        if len(self.webhooks) > MAX_WEBHOOKS:
            raise InvalidArgument(f"a rollout has at most {MAX_WEBHOOKS} webhooks")
        if self.decision_top_k < 1 or (
            self.decision_top_k > 1 and self.decision_threshold is not None
        ):
            raise InvalidArgument(
                "decision_top_k must be at least 1, and larger only without a decision_threshold"
            )
        for text in (self.parameter, *self.webhooks):
            if len(text) > MAX_TEXT or not text.isprintable():
                raise InvalidArgument("a parameter's name or a URL is too long or unprintable")
        for url in self.webhooks:
            if not _is_web_address(url):
                raise InvalidArgument(f"the webhook '{url}' is not an http:// or https:// URL")

    def _check_sides(self) -> None:
        if not ROLLOUT_ID.match(self.id):
            raise InvalidArgument("the id of a rollout has 32 hexadecimal digits")
        for name in (self.model, self.baseline.model, self.candidate.model):
            if not is_model_name(name):
                raise InvalidArgument(f"'{name}' is not a valid model name")
        for side in (self.baseline, self.candidate):
            if not 1 <= side.version <= MAX_VERSION:
                raise InvalidArgument(f"{side.version} is not a valid version")
        if self.baseline == self.candidate:
            raise InvalidArgument(
                f"version {self.candidate.version} of model '{self.candidate.model}' is the "
                "baseline already; the candidate must be another"
            )
        if self.label and not LABEL_NAME.match(self.label):
            raise InvalidArgument(f"'{self.label}' is not a valid label")

    @property
    def moves_default(self) -> bool:
        """Whether requests without a version belong to the rollout."""
        return self.default_version in (0, self.baseline.version)

    @property
    def stages(self) -> tuple[RolloutStage, ...]:
        """The shadow stage, if any, and the canary stages."""
        return _stages(self.shadow, self.steps)

    @property
    def canary_shares_before(self) -> tuple[float, ...]:
        """The candidate's share of the requests before each of ``stages``."""
        shares = [each.share for each in self.stages if each.kind is StageKind.CANARY]
        before = [0.0, *shares[:-1]]
        return tuple(before) if len(before) == len(self.stages) else (0.0, *before)

    def new_share(self, stage: int) -> float:
        """The share of the keys left at the baseline that a canary stage moves to the candidate.

        Requests that are assigned one by one have no past: the share of the stage.
        """
        share, before = self.stages[stage].share, self.canary_shares_before[stage]
        if self.assignment is AssignmentKind.REQUEST:
            return share
        return (share - before) / (1 - before)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        document: dict[str, Any] = orjson.loads(checked_json.write(self))
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RolloutPlan:
        """The plan of ``to_json``'s document.

        Raises:
            InvalidArgument: a field is missing, unknown, or of another type or range.
        """
        return checked_json.read(cls, checked_json.write(document))


@lru_cache(64)  # it is asked for several times in each decision
def _stages(shadow: float, steps: tuple[float, ...]) -> tuple[RolloutStage, ...]:
    first = (RolloutStage(StageKind.SHADOW, shadow),) if shadow else ()
    return (*first, *(RolloutStage(StageKind.CANARY, share) for share in steps))


def public_url(url: str) -> str:
    """The scheme, host and port of a URL: its user, path and query may be secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _is_web_address(url: str) -> bool:
    """Whether ``url`` is one of HTTP with a host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
