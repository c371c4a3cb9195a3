"""``slo.toml``: the limits of a candidate, for the gate before a release and the rollout during it.

Everything has a default; an empty file is a gate on regressions. ``false`` switches a criterion
off. Unknown tables and keys are errors, and so are values of the wrong type or range. Gate and
rollout read the same file, and each ignores what only the other measures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelport.gateway.errors import UsageError
from modelport.gateway.toml_tables import (
    count,
    digest,
    number,
    one_of,
    or_off,
    paths,
    read_by,
    read_file,
    read_table,
    text,
    truth,
)

#: Most connections (one per user) of a load generator, and a rate beyond what it can send.
MOST_USERS, MOST_RATE = 10_000, 1e6
#: Protocols of a load; the values are those of ``--protocol``.
LOAD_PROTOCOLS = (
    "oip-http",
    "oip-http2",
    "oip-http-binary",
    "oip-grpc",
    "tfserving-http",
    "tfserving-grpc",
    "torchserve-http",
    "torchserve-grpc",
    "triton-http",
    "triton-grpc",
)

_MOST = read_by(or_off(number(0, math.inf, open_end=True)))
_LARGEST_SHARE = read_by(or_off(number(0, 1)))
#: Larger regressions are not a meaningful limit.
_LARGEST_CHANGE = read_by(or_off(number(0, 10)))
_LARGEST_RATIO = read_by(or_off(number(0, 1000)))


@dataclass(frozen=True)
class AbsoluteLimits:
    """Limits of the candidate's own figures."""

    p50_ms: float | None = field(default=None, metadata=_MOST)
    p99_ms: float | None = field(default=None, metadata=_MOST)
    #: Time to first response, warm: from sending to the answer's first byte.
    first_byte_p50_ms: float | None = field(default=None, metadata=_MOST)
    first_byte_p99_ms: float | None = field(default=None, metadata=_MOST)
    #: Time to first response, cold: process start to the first correct answer. Folders only.
    first_response_seconds: float | None = field(default=None, metadata=_MOST)
    #: Process start to READY. Folders only.
    cold_start_seconds: float | None = field(default=None, metadata=_MOST)
    #: Share of requests that are refused, fail or time out: the error budget.
    max_error_share: float | None = field(default=0.001, metadata=_LARGEST_SHARE)
    max_wrong_share: float | None = field(default=0.001, metadata=_LARGEST_SHARE)


@dataclass(frozen=True)
class Regressions:
    """Accepted slowdown against the baseline: 0.05 allows 5 %.

    A regression of 15 % must be detected; the default of 5 % makes it unlikely that one passes.
    """

    max_p50_regression: float | None = field(default=0.05, metadata=_LARGEST_CHANGE)
    max_p99_regression: float | None = field(default=0.05, metadata=_LARGEST_CHANGE)
    max_first_byte_p50_regression: float | None = field(default=None, metadata=_LARGEST_CHANGE)
    max_first_byte_p99_regression: float | None = field(default=None, metadata=_LARGEST_CHANGE)
    #: Larger, as a start gives one observation per round and a load thousands.
    max_first_response_regression: float | None = field(default=0.15, metadata=_LARGEST_CHANGE)
    max_cold_start_regression: float | None = field(default=None, metadata=_LARGEST_CHANGE)
    #: Accepted loss of accuracy or AUC, in its own unit, on --data with labels.
    max_drop: float | None = field(default=0.01, metadata=_LARGEST_SHARE)
    #: Of a rollout: the candidate's errors, and its wrong decisions by later labels, as a multiple
    #: of the baseline's.
    max_error_ratio: float | None = field(default=1.5, metadata=_LARGEST_RATIO)
    max_quality_ratio: float | None = field(default=1.1, metadata=_LARGEST_RATIO)
    #: Of a rollout: a smaller difference in milliseconds is not a regression.
    min_regression_ms: float = field(default=0.5, metadata=read_by(number(0, 60_000)))


@dataclass(frozen=True)
class VerdictSettings:
    """The required confidence."""

    #: 1 - the error probability, of failing a good candidate and of passing a bad one.
    confidence: float = field(default=0.95, metadata=read_by(number(0.5, 0.9999)))


@dataclass(frozen=True)
class DurationSettings:
    """The lengths of slices, rounds and the whole gate."""

    max_seconds: float = field(default=600.0, metadata=read_by(number(1, 7 * 86_400)))
    #: Length of one slice of load; a round alternates ``slices`` of each side.
    slice_seconds: float = field(default=3.0, metadata=read_by(number(0.2, 3600)))
    warmup_seconds: float = field(default=0.5, metadata=read_by(number(0, 600)))
    slices: int = field(default=2, metadata=read_by(count(1)))
    #: Rounds before anything about latency is decided.
    min_rounds: int = field(default=5, metadata=read_by(count(2)))
    #: Time limit for a server to become ready.
    ready_seconds: float = field(default=120.0, metadata=read_by(number(1, 3600)))


@dataclass(frozen=True)
class Traffic:
    """The load, the same on both sides."""

    protocol: str = field(default="oip-http-binary", metadata=read_by(one_of(LOAD_PROTOCOLS)))
    #: Most requests in flight; without a rate this many always (closed loop).
    users: int = field(default=1, metadata=read_by(count(1, MOST_USERS)))
    rate_per_second: float | None = field(
        default=None, metadata=read_by(or_off(number(0, MOST_RATE, open_end=True)))
    )
    batch_size: int = field(default=1, metadata=read_by(count(1)))
    timeout_seconds: float = field(default=30.0, metadata=read_by(number(0.001, 3600)))

    @property
    def has_single_user(self) -> bool:
        """Whether there is a single user without a rate, who can ask both sides in turn."""
        return self.users == 1 and self.rate_per_second is None


@dataclass(frozen=True)
class CertificateSettings:
    """Requirements on a candidate in a folder; its files must match the manifest in any case."""

    required: bool = field(default=True, metadata=read_by(truth))
    #: One of these Ed25519 keys (PEM) must have signed it; paths are relative to the file.
    public_keys: tuple[Path, ...] = field(default=(), metadata=read_by(paths))
    model: str | None = field(default=None, metadata=read_by(text))
    checkpoint_sha256: str | None = field(default=None, metadata=read_by(digest))


@dataclass(frozen=True)
class Answers:
    """An answer is right if ``|error| <= atol + rtol * |expected|``; defaults come from
    certificates."""

    #: Whether the candidate has another checkpoint and is compared with its own answers; None:
    #: the certificates decide.
    retrained: bool | None = field(default=None, metadata=read_by(truth))
    atol: float | None = field(default=None, metadata=read_by(number(0, math.inf)))
    rtol: float | None = field(default=None, metadata=read_by(number(0, math.inf)))
    #: Of a rollout: share of compared answers that may disagree, and of those with a missing,
    #: misshapen or non-finite output.
    max_disagreement: float | None = field(default=0.001, metadata=_LARGEST_SHARE)
    max_invalid: float | None = field(default=0.001, metadata=_LARGEST_SHARE)
    #: Of a rollout of a retrained candidate: share of a class's decisions that may become others,
    #: share of the decisions that one class may gain or lose, and share of the scores that may
    #: move by a tenth of their range in one direction.
    max_class_changes: float | None = field(default=0.4, metadata=_LARGEST_SHARE)
    max_class_shift: float | None = field(default=0.05, metadata=_LARGEST_SHARE)
    max_score_shift: float | None = field(default=0.1, metadata=_LARGEST_SHARE)
    #: Of a rollout: the output whose decision callers take, and either its threshold or the number
    #: of largest classes whose set is the decision. None: as the certificates say.
    decision_output: str | None = field(default=None, metadata=read_by(text))
    decision_threshold: float | None = field(
        default=None, metadata=read_by(number(-math.inf, math.inf))
    )
    decision_top_k: int | None = field(default=None, metadata=read_by(count(1)))


@dataclass(frozen=True)
class RolloutSettings:
    """The conditions of each stage of a rollout."""

    #: Least requests that the candidate answers, or that are compared in the shadow stage.
    min_requests: int = field(default=100, metadata=read_by(count(1, 10**12)))
    #: Probability of finding the harm that a stage is meant to find, before it ends; false: a stage
    #: ends with its least requests and time.
    power: float | None = field(default=0.95, metadata=read_by(or_off(number(0.5, 0.999))))
    #: Share of all requests that both sides answer in the canary stages, to compare the answers.
    pair: float = field(default=0.1, metadata=read_by(number(0, 1)))
    min_seconds: float = field(default=60.0, metadata=read_by(number(0, 30 * 86_400)))
    #: Duration after which a stage that lacks something is paused.
    max_seconds: float = field(default=86_400.0, metadata=read_by(number(1, 30 * 86_400)))


@dataclass(frozen=True)
class Slo:
    """The content of ``slo.toml``."""

    limits: AbsoluteLimits = field(default_factory=AbsoluteLimits)
    regressions: Regressions = field(default_factory=Regressions)
    verdict: VerdictSettings = field(default_factory=VerdictSettings)
    duration: DurationSettings = field(default_factory=DurationSettings)
    load: Traffic = field(default_factory=Traffic)
    certificate: CertificateSettings = field(default_factory=CertificateSettings)
    answers: Answers = field(default_factory=Answers)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    #: ``table.key`` of all settings in the file.
    said: frozenset[str] = frozenset()

    @property
    def wants_labels(self) -> bool:
        """Whether a limit on the loss of accuracy was set explicitly."""
        return "regressions.max_drop" in self.said and self.regressions.max_drop is not None


def read(path: Path) -> Slo:
    """Read the file.

    Raises:
        UsageError: it cannot be read, or has an invalid setting; the message names the key.
    """
    document = read_file(path, "--slo")
    try:
        slo = parse(document)
    except ValueError as error:
        raise UsageError(f"'{path}': {error}") from error
    keys = tuple(path.parent / key for key in slo.certificate.public_keys)
    certificate = dataclasses.replace(slo.certificate, public_keys=keys)
    return dataclasses.replace(slo, certificate=certificate)


def parse(document: Mapping[str, Any]) -> Slo:
    """Parse a TOML document.

    Raises:
        ValueError: an unknown table or key, or an invalid value; the message names it.
    """
    sections = {one.name: one.default_factory for one in dataclasses.fields(Slo)}
    del sections["said"]
    parts: dict[str, Any] = {}
    said: set[str] = set()
    for name, table in document.items():
        if name not in sections:
            what = f"table [{name}]" if isinstance(table, dict) else f"key '{name}'"
            raise ValueError(f"unknown {what}; there are [{'], ['.join(sections)}]")
        if not isinstance(table, dict):
            raise ValueError(f"'{name}' must be a table, [{name}]")
        parts[name] = read_table(name, sections[name], table)
        said |= {f"{name}.{key}" for key in table}
    return Slo(**parts, said=frozenset(said))
