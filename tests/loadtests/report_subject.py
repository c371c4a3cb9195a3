"""Results as a machine would give them, seeded, for the tests of the reports."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from modelport.gateway.rollout.plan import ComparisonKind, RolloutLimits
from modelport.gateway.rollout.shared_state import transitions
from modelport.gateway.rollout.shared_state.state import RolloutPhase
from modelport.gateway.rollout.shared_state.transitions import Change
from modelport.gateway.rollout.statistics.counts import Attribution, StageCounts, latency_bucket
from modelport.gateway.rollout.statistics.evidence import criteria_of
from modelport.gateway.rollout.statistics.latency_ranks import RANK_SHARES, heavier
from modelport.loadtests.checks import Check, CheckStatus
from modelport.loadtests.compare.result import Absent, Candidate, Comparison, Measured, Percentiles
from modelport.loadtests.compare.verdict_matrix import matrix
from modelport.loadtests.gate.decision import GateDecision, Question
from modelport.loadtests.load.samples import SAMPLE, LoadProfile, LoadRun, Outcome
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from tests.gateway.rollout import plans

#: Markup, quotes, mathematics of matplotlib's kind, control characters, 200 letters, pictures.
HOSTILE = (
    '<script>document.title="owned"</script>',
    '"><img src=x onerror="document.title=\'owned\'">',
    "$\\frac{1}{$ {{ 7 * 7 }} {% raw %} ' \" & \x00\x1b[31m\u202e",
    "a" * 200,
    "\N{ROCKET} onnx int8 · ONNX Runtime \N{FAMILY}",
    "| pipe | `code` <!-- compare: end --> ]]> \n second line",
)
ROUNDS, ASKED = 3, 600
LOADS = (("oip-http-binary", "closed", 1, None), ("oip-http-binary", "closed", 16, None))
#: Name, format, precision, backend, bytes, largest error, factor of latency, cold start.
BACKENDS = (
    ("onnx fp32 · ONNX Runtime", "onnx", "fp32", "onnxruntime", 1_413_000, 3e-7, 1.0, 0.9),
    ("onnx int8 · ONNX Runtime", "onnx", "int8", "onnxruntime", 436_000, 4e-3, 0.8, 0.8),
    ("torchscript · PyTorch", "torchscript", "fp32", "pytorch", 1_530_000, 0.0, 2.1, 3.4),
    ("savedmodel · TensorFlow", "savedmodel", "fp32", "tensorflow", 2_010_000, 6e-7, 2.6, 5.2),
    ("tflite fp32 · LiteRT", "tflite", "fp32", "tflite", 1_398_000, 4e-7, 1.6, 0.7),
    ("tflite int8 · LiteRT", "tflite", "int8", "tflite", 402_000, 7e-3, 1.3, 0.7),
    ("torchscript · TorchServe", "torchscript", "fp32", "torchserve", 1_530_000, None, 6.5, 11.8),
)


@functools.cache
def comparison(names: tuple[str, ...] = (), seed: int = 7) -> Comparison:
    """Seven candidates, the fifth of them disqualified; ``names`` replace the first ones' names."""
    random = np.random.default_rng(seed)
    found = tuple(_candidate(random, *row) for row in BACKENDS)
    found = tuple(
        dataclasses.replace(candidate, name=names[n]) if n < len(names) else candidate
        for n, candidate in enumerate(found)
    )
    wrong = dataclasses.replace(found[4], disqualified="12 of 8,114 answers were wrong")
    found = (*found[:4], wrong, *found[5:])
    return Comparison(
        model="fraud",
        source="fraud.pt, sha256 9f2c41d07b1e",
        began_at="2026-11-21T19:40:03Z",
        seconds=462.0,
        hardware={
            "cpu": "AMD EPYC 9R14",
            "cores": "2",
            "memory_gib": "7.6",
            "os": "Debian GNU/Linux 12",
            "python": "3.11.2",
            "onnxruntime": "1.24.1",
            "torch": "2.13.0",
        },
        slo_p99_ms=10.0,
        rounds=ROUNDS,
        candidates=found,
        absent=(
            Absent("triton", "tritonserver is not installed; pip install 'nvidia-tritonserver'"),
            Absent("tfserving", "no tensorflow_model_server on PATH; run it with Docker"),
        ),
        matrix=matrix(found, 10.0),
        command="modelport compare checkpoints/fraud.pt --price 0.10 --currency EUR",
        price_per_hour=0.10,
        currency="EUR",
        seed=seed,
        notes=("The client ran on core 1, every server on core 0.",),
    )


def _curve(milliseconds: np.ndarray) -> tuple[tuple[float, float], ...]:
    quantiles = 1 - 10 ** -np.linspace(0, 3.5, 70)
    return tuple(
        (float(q), float(value))
        for q, value in zip(quantiles, np.quantile(milliseconds, quantiles), strict=True)
    )


def _percentiles(milliseconds: np.ndarray) -> Percentiles:
    at = np.quantile(milliseconds, [0.5, 0.9, 0.95, 0.99, 0.999, 1.0])
    return Percentiles(*(float(value) for value in at))


def _measured(
    random: np.random.Generator,
    number: int,
    load: tuple[str, str, int, float | None],
    factor: float,
) -> Measured:
    protocol, loop, users, rate = load
    queue = 0.55 * users if rate is None else 1 / (1.05 - rate * factor / 800)
    middle = factor * (0.4 + queue)
    times = middle * random.lognormal(0, 0.16, ASKED) * random.normal(1, 0.015)
    times += (random.random(ASKED) < 0.012) * random.exponential(3.0 * middle, ASKED)
    per_second = rate or 1000 * users / float(times.mean())
    return Measured(
        round=number,
        protocol=protocol,
        loop=loop,
        users=users,
        rate=rate,
        requests=ASKED,
        requests_per_second=per_second,
        latency=_percentiles(times),
        first_byte=_percentiles(times * 0.98),
        wrong=0,
        refused=0,
        failed=0,
        errors={},
        server_cpu_seconds=ASKED * factor * 0.8e-3,
        curve=_curve(times),
    )


def _candidate(
    random: np.random.Generator,
    name: str,
    form: str,
    precision: str,
    backend: str,
    size: int,
    error: float | None,
    factor: float,
    cold: float,
) -> Candidate:
    spoken = "torchserve-http" if backend == "torchserve" else LOADS[0][0]
    open_loops = [("oip-http-binary", "open", 64, round(r / factor)) for r in (200.0, 400.0, 700.0)]
    runs = tuple(
        _measured(random, number, (spoken, *load[1:]), factor)
        for number in range(ROUNDS)
        for load in (*LOADS, *open_loops)
    )
    starts = tuple(float(cold * random.normal(1, 0.06)) for _ in range(ROUNDS))
    rates = tuple(float(900 / factor * random.normal(1, 0.03)) for _ in range(ROUNDS))
    return Candidate(
        name=name,
        format=form,
        precision=precision,
        backend=backend,
        direct=backend == "torchserve",
        artifact_bytes=size,
        max_abs_error=error,
        agreement=None if error is None else 1.0 - error / 10,
        decisions=None if error is None else 4000,
        metric_name=None if error is None else "AUC",
        metric=None if error is None else 0.9561 - error / 4,
        cold_start_seconds=starts,
        cold_first_response_seconds=tuple(start * 1.15 + 0.01 for start in starts),
        memory_bytes=tuple(int((90 + 60 * factor) * 2**20 * random.normal(1, 0.02)) for _ in rates),
        runs=runs,
        rate_under_slo=(None, *rates[1:]) if factor > 6 else rates,
        cpu_seconds_per_request=tuple(factor * 0.8e-3 * random.normal(1, 0.04) for _ in rates),
        cost_per_million=0.10 * factor / 3.2,
    )


def run(
    requests: int = 6000, failures: int = 40, rate: float | None = 300.0, seed: int = 3
) -> LoadRun:
    """An open-loop run with a stall in the middle, and ``failures`` refused or wrong."""
    random = np.random.default_rng(seed)
    load = LoadProfile(users=32, rate=rate, duration_seconds=20.0, warmup_seconds=1.0, seed=seed)
    intended = np.sort(random.uniform(1.0, 21.0, requests))
    took = 0.004 * random.lognormal(0, 0.25, requests) + 0.1 * np.exp(-((intended - 11) ** 2) * 20)
    samples = np.zeros(requests, SAMPLE)
    samples["intended"], samples["sent"] = intended, intended + 1e-4
    samples["done"], samples["first_byte"] = intended + took, intended + took * 0.97
    bad = random.choice(requests, failures, replace=False)
    samples["outcome"][bad] = random.choice([Outcome.WRONG, Outcome.REFUSED], failures)
    target = LoadTestTarget(LoadTestProtocol.OIP_HTTP_BINARY, "127.0.0.1:8000", "fraud", "3")
    errors = {"HTTP 503: the queue is full": failures // 2, HOSTILE[0]: failures - failures // 2}
    return LoadRun(
        target=target,
        load=load,
        samples=samples,
        errors=errors if failures else {},
        client_cpu_seconds=6.2,
        client_cpu_share=0.3,
        began_at="2026-11-21T19:40:03Z",
    )


def decision(name: str = "fraud/2") -> GateDecision:
    """A gate's, with one question of every kind and of every answer."""
    questions = (
        Question(
            "p50 latency", "ms", CheckStatus.PASS, 4.0, 4.1, 1.02, 0.99, 1.05, 1.1, relative=True
        ),
        Question(
            "p99 latency", "ms", CheckStatus.FAIL, 14, 16.4, 1.17, 1.13, 1.21, 1.1, relative=True
        ),
        Question(
            "time to first response",
            "s",
            CheckStatus.INCONCLUSIVE,
            0.9,
            0.93,
            1.03,
            0.92,
            1.14,
            1.1,
            "undecided: about 3.0 times the duration would decide it",
            relative=True,
        ),
        Question("wrong answers", "share", CheckStatus.PASS, 0.0, 0.0, 0.0, 0.0, 0.0008, 0.001),
        Question(f"certificate of {name}", "", CheckStatus.PASS, detail="signed by 12ab"),
    )
    return GateDecision(
        status=CheckStatus.FAIL,
        questions=questions,
        baseline="fraud/1",
        candidate=name,
        baseline_runs=(run(3000, 0, seed=1), run(3000, 0, seed=2)),
        candidate_runs=(run(3000, 9, seed=4), run(3000, 12, seed=5)),
        rounds=2,
        seconds=120.0,
        began_at="2026-11-21T19:40:03Z",
        command="modelport gate fraud/1 fraud/2 --slo slo.toml",
        hardware={"cpu": "AMD EPYC 9R14", "cores": "2"},
        notes=("The client ran on core 1.",),
    )


def rollout(ending: RolloutPhase, text: str = "no harm was found") -> dict[str, Any]:
    """The status of a retrained candidate's rollout that has ended so, with ``text`` in events."""
    wanted = plans.plan(
        id=32 * "0", shadow=0.1, steps=(0.05, 0.25, 1.0), comparison=ComparisonKind.DECISIONS,
        limits=RolloutLimits(max_disagreement=0.03), decision_threshold=0.5,
    )  # fmt: skip
    state = transitions.started(wanted, None, "", Change(1.7e9, by="ana"))
    for minutes in (5, 10, 20):
        state = transitions.advanced(state, "", Change(1.7e9 + 60 * minutes, text))
    if ending is RolloutPhase.PROMOTED:
        state = transitions.advanced(state, "", Change(1.7e9 + 2400, text))
    else:
        state = transitions.rolled_back(state, "", Change(1.7e9 + 2200, f"p99: {text}"))
    slower = 1.0 if ending is RolloutPhase.PROMOTED else 1.4
    counts = [_stage(number, slower) for number in range(4)]
    criteria = tuple(each.to_json() for each in criteria_of(wanted, counts))
    document = transitions.with_evidence(state, criteria, counts).to_json()
    return document | {"leads": True, "share": 0.0, "problem": text if text in HOSTILE else ""}


def _stage(number: int, slower: float) -> StageCounts:
    """Counts of 20,000 requests, of which the candidate's share grows."""
    generator, share = np.random.default_rng(number), (0.0, 0.05, 0.25, 1.0)[number]
    counts = StageCounts(sources=1)
    if not number:
        counts.compared, counts.disagreed, counts.dropped = 5_800, 151, 204
    for side, part in ((counts.baseline, 1 - share), (counts.candidate, share)):
        side.requests = round(20_000 * part)
        side.errors = int(generator.binomial(side.requests, 0.001))
        is_candidate = side is counts.candidate
        seconds = 2e-3 * generator.lognormal(0.0, 0.4, side.requests)
        seconds[: side.requests // 40] *= 4 * (slower if is_candidate else 1.0)
        for value in seconds.tolist():
            bucket = latency_bucket(value)
            side.latency[bucket] = side.latency.get(bucket, 0) + 1
        scores = generator.beta(0.4, 4 - is_candidate, side.requests) * 20
        side.scores = dict(
            zip(
                *(e.tolist() for e in np.unique(scores.astype(int), return_counts=True)),
                strict=True,
            )
        )
    errors = counts.candidate.errors, counts.baseline.errors
    counts.errors = Attribution(errors[0], sum(errors))
    if 0 < share < 1:
        slowed = share * heavier(0.9, slower)
        for rank, part in enumerate(slowed + (1 - share) * RANK_SHARES):
            events = round(20_000 * slowed[rank])
            counts.ranks[rank] = Attribution(events, max(events, round(20_000 * part)))
    return counts


EXAMPLE = {
    "id": HOSTILE[0], "stage": 0, "parameters": {HOSTILE[1]: HOSTILE[2]},
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.25] * 64}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [0.49]}],
    "candidate_outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [0.51]}],
}  # fmt: skip

CHECKS = (
    Check(
        "p99 latency", CheckStatus.FAIL, "86.1 ms", "at most 20 ms", "p99 is 4.3 times the bound"
    ),
    Check("errors", CheckStatus.PASS, "0.667 %", "at most 1 %"),
    Check(HOSTILE[0], CheckStatus.INCONCLUSIVE, HOSTILE[1], HOSTILE[2], HOSTILE[5]),
)
