"""What `modelport compare` finds out: plain data, the same in ``--json``, report and matrix.

Every figure that noise can move is a tuple with one value per interleaved round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelport.loadtests.summary import Percentiles


@dataclass(frozen=True)
class Measured:
    """One load on one candidate in one round."""

    round: int
    protocol: str
    #: "closed" or "open".
    loop: str
    users: int
    #: Intended requests a second, of an open loop.
    rate: float | None
    requests: int
    #: Right answers a second.
    requests_per_second: float
    latency: Percentiles
    #: Send to first byte of the answer.
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
    """One format on one backend: what is compared."""

    #: Unique and for people: "onnx int8 · ONNX Runtime".
    name: str
    format: str
    precision: str
    #: onnxruntime, pytorch, tensorflow, tflite, torchserve, triton, tfserving.
    backend: str
    #: True: asked at its own ports; false: through the gateway.
    direct: bool
    artifact_bytes: int
    #: From the certificate: largest absolute error against the checkpoint, share of decisions kept,
    #: the held-out metric (None where there is none).
    max_abs_error: float | None = None
    agreement: float | None = None
    #: How many decisions that share is of.
    decisions: int | None = None
    metric_name: str | None = None
    metric: float | None = None
    #: Of the metric, where it was measured here on labelled rows, and not read in the certificate.
    metric_interval: tuple[float, float] | None = None
    #: Process start → READY, each round.
    cold_start_seconds: tuple[float, ...] = ()
    #: Process start → first correct answer, each round.
    cold_first_response_seconds: tuple[float, ...] = ()
    #: Resident bytes of all its processes at the end of each round's load.
    memory_bytes: tuple[int, ...] = ()
    runs: tuple[Measured, ...] = ()
    #: The highest rate whose p99 stayed under the bound, each round; None: not even the lowest.
    rate_under_slo: tuple[float | None, ...] = ()
    cpu_seconds_per_request: tuple[float, ...] = ()
    #: From the price that the user stated.
    cost_per_million: float | None = None
    #: Why it may not win, whatever its speed: wrong answers, errors, no certificate.
    disqualified: str | None = None


@dataclass(frozen=True)
class Absent:
    """A backend or format that this machine has not, or that failed."""

    name: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """One row of the matrix: who won at one thing that a team may care about."""

    #: "Tail latency", "Throughput", "Cold start", "Memory", "Artifact size", "Accuracy",
    #: "Edge deployment", "Operational maturity".
    concern: str
    #: What was compared, with its unit.
    measure: str
    #: None where nobody qualified, and where the first is not better than the noise (a margin then
    #: says by how much it seems to be).
    winner: str | None
    #: Best first: (candidate, its median, spread as printed).
    ranking: tuple[tuple[str, float, str], ...]
    #: How much better than the second, as a ratio ≥ 1; None with a single candidate.
    margin: float | None
    #: Whether the interval of that ratio excludes 1.
    beyond_noise: bool
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """The whole of it."""

    model: str
    #: File name and SHA-256, or the published versions compared.
    source: str
    #: ISO 8601, UTC.
    began_at: str
    seconds: float
    #: cpu, cores, memory_gib, os, python, and each runtime's version.
    hardware: Mapping[str, str]
    #: p99 bound of the search for throughput, milliseconds.
    slo_p99_ms: float
    rounds: int
    candidates: tuple[Candidate, ...]
    absent: tuple[Absent, ...] = ()
    matrix: tuple[Verdict, ...] = ()
    #: The command that made it.
    command: str = ""
    price_per_hour: float | None = None
    currency: str = ""
    seed: int = 0
    notes: tuple[str, ...] = field(default=())
