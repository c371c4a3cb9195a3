"""Results of `modelport compare` as plain data, for ``--json-report``, report and matrix.

Every noisy figure is a tuple with one value per interleaved round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from modelport.loadtests.load.percentiles import Percentiles

#: A document with a field that is unknown here is not read.
STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class Measured:
    """One load on one candidate in one round."""

    __pydantic_config__: ClassVar = STRICT

    round: int
    protocol: str
    #: "closed" or "open".
    loop: str
    users: int
    #: Intended requests per second of an open loop.
    rate: float | None
    requests: int
    #: Correct answers per second.
    requests_per_second: float
    latency: Percentiles
    #: From sending to the first byte of the answer.
    first_byte: Percentiles
    wrong: int
    refused: int
    failed: int
    errors: Mapping[str, int]
    server_cpu_seconds: float
    #: (quantile, milliseconds) along the whole curve, for the latency plot.
    curve: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Candidate:
    """One format on one backend."""

    __pydantic_config__: ClassVar = STRICT

    #: A unique name for people: "onnx int8 · ONNX Runtime".
    name: str
    format: str
    precision: str
    #: onnxruntime, pytorch, tensorflow, tflite, torchserve, triton, tfserving.
    backend: str
    #: True: asked at its own ports; False: through the gateway.
    direct: bool
    artifact_bytes: int
    #: From the certificate: the largest absolute error against the checkpoint, the share of
    #: decisions that agree, the held-out metric (None if there is none).
    max_abs_error: float | None = None
    agreement: float | None = None
    #: The number of decisions behind that share.
    decisions: int | None = None
    #: From the certificate of an optimised file: its speed over the unoptimised one, and the rows
    #: of a request.
    speedup: float | None = None
    speedup_rows: int | None = None
    metric_name: str | None = None
    metric: float | None = None
    #: Interval of the metric if it was measured here, rather than read from the certificate.
    metric_interval: tuple[float, float] | None = None
    #: Process start to READY, each round.
    cold_start_seconds: tuple[float, ...] = ()
    #: Process start to first correct answer, each round.
    cold_first_response_seconds: tuple[float, ...] = ()
    #: Resident bytes of all its processes at the end of each round's load.
    memory_bytes: tuple[int, ...] = ()
    runs: tuple[Measured, ...] = ()
    #: The highest rate whose p99 stayed within the limit, each round; None: no rate did.
    rate_under_slo: tuple[float | None, ...] = ()
    cpu_seconds_per_request: tuple[float, ...] = ()
    #: From the price that the user gave.
    cost_per_million: float | None = None
    #: The reason that it cannot win: wrong answers, errors, no certificate.
    disqualified: str | None = None


@dataclass(frozen=True)
class Absent:
    """A backend or format that is missing on this machine, or that failed."""

    __pydantic_config__: ClassVar = STRICT

    name: str
    why: str


@dataclass(frozen=True)
class ConcernVerdict:
    """One row of the matrix: the winner of one concern."""

    __pydantic_config__: ClassVar = STRICT

    #: "Tail latency", "Throughput", "Cold start", "Memory", "Artifact size", "Accuracy",
    #: "Edge deployment", "Operational maturity".
    concern: str
    #: The compared measure, with its unit.
    measure: str
    #: None if no candidate qualified, or if the lead is within the noise (``margin`` then has the
    #: apparent lead).
    winner: str | None
    #: Best first: (candidate, its median, spread as printed).
    ranking: tuple[tuple[str, float, str], ...]
    #: Ratio to the second, at least 1; None with a single candidate.
    margin: float | None
    #: Whether the interval of that ratio excludes 1.
    beyond_noise: bool
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """A complete comparison."""

    __pydantic_config__: ClassVar = STRICT

    model: str
    #: File name and SHA-256, or the published versions compared.
    source: str
    #: ISO 8601, UTC.
    began_at: str
    seconds: float
    #: cpu, cores, memory_gib, os, python, and each runtime's version.
    hardware: Mapping[str, str]
    #: p99 limit of the search for the highest rate, milliseconds.
    slo_p99_ms: float
    rounds: int
    candidates: tuple[Candidate, ...]
    absent: tuple[Absent, ...] = ()
    matrix: tuple[ConcernVerdict, ...] = ()
    #: The command that was run.
    command: str = ""
    price_per_hour: float | None = None
    currency: str = ""
    seed: int = 0
    notes: tuple[str, ...] = field(default=())
