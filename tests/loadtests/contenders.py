"""Candidates made by hand: figures for the matrix, and the 4-float model for real servers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tiny_model
from modelport.loadtests.compare.artifacts import Certified, ComparedArtifact
from modelport.loadtests.compare.measured_candidate import MeasuredCandidate
from modelport.loadtests.compare.plan import Entry, Variant
from modelport.loadtests.compare.result import Candidate, Measured
from modelport.loadtests.load import payloads
from modelport.loadtests.load.payloads import Payloads
from modelport.loadtests.load.percentiles import Percentiles
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.serving.gateway import MeasuredGateway
from modelport.loadtests.serving.server import MeasuredServerLaunch, ServedBackend, get
from modelport.loadtests.system.processes import HOST, free_ports

USERS, SLO_P99_MS = 16, 20.0


def percentiles(p99: float) -> Percentiles:
    return Percentiles(p99 / 4, p99 / 2, p99 / 1.5, p99, p99 * 1.5, p99 * 2)


def run(number: int, p99: float, users: int = USERS, **changes: Any) -> Measured:
    return replace(
        Measured(
            round=number,
            protocol="oip-http",
            loop="closed",
            users=users,
            rate=None,
            requests=1000,
            requests_per_second=500.0,
            latency=percentiles(p99),
            first_byte=percentiles(p99 / 2),
            wrong=0,
            refused=0,
            failed=0,
            errors={},
            server_cpu_seconds=1.0,
            curve=((0.5, p99 / 4), (0.99, p99)),
        ),
        **changes,
    )


def candidate(
    name: str,
    *,
    format: str = "onnx",
    backend: str = "onnxruntime",
    p99: Sequence[float] = (10.0, 10.1, 9.9),
    rates: Sequence[float | None] = (500.0, 505.0, 495.0),
    **changes: Any,
) -> Candidate:
    made = Candidate(
        name=name,
        format=format,
        precision="fp32",
        backend=backend,
        direct=False,
        artifact_bytes=1000,
        max_abs_error=1e-7,
        agreement=1.0,
        decisions=4000,
        cold_start_seconds=(0.5,) * len(p99),
        cold_first_response_seconds=(0.6,) * len(p99),
        memory_bytes=(10**8,) * len(p99),
        runs=tuple(run(number, value) for number, value in enumerate(p99)),
        rate_under_slo=tuple(rates),
        cpu_seconds_per_request=(0.001,) * len(p99),
    )
    return replace(made, **changes)


def doubled(count: int = 16) -> Payloads:
    """Requests for the 4-float model, y = 2x."""
    rng = np.random.default_rng(0)
    drawn = [rng.standard_normal((1, 4)).astype(np.float32) for _ in range(count)]
    asked, right = tuple({"x": x} for x in drawn), tuple({"y": 2 * x} for x in drawn)
    return Payloads(asked, {"x": "FP32"}, right, absolute_tolerance=1e-6, relative_tolerance=1e-6)


def published() -> Path:
    """The 4-float model's folder."""
    return tiny_model.repository() / tiny_model.NAME


class LightBackend:
    """A server of a few lines: for tests in which the server itself is not measured."""

    def launch(self, work: Path) -> MeasuredServerLaunch:
        (port,) = free_ports(1)
        address, asked = f"{HOST}:{port}", LoadTestProtocol.OIP_HTTP
        return MeasuredServerLaunch(
            command=(sys.executable, "-m", "tests.loadtests.oip_server", str(port)),
            targets={asked: LoadTestTarget(asked, address, tiny_model.NAME)},
            ready=lambda: get(address, "/v2/health/ready")[0] == 200,
        )


def contender(name: str, folder: Path, backend: ServedBackend | None = None) -> MeasuredCandidate:
    """The 4-float model in a gateway, or in ``backend``."""
    requests = folder / "requests.json"
    if not requests.is_file():
        payloads.write(doubled(), requests)
    proven = Certified(1000, 0.0, 0.0, 1e-6, 1e-6, 1.0, 100, None, None, "x2", "0" * 64)
    variant = Variant("onnx")
    return MeasuredCandidate(
        name=name,
        entry=Entry(variant, "onnxruntime"),
        artifact=ComparedArtifact(variant, published(), "1", proven),
        backend=backend or MeasuredGateway(published()),
        requests=requests,
        payloads=payloads.read(requests),
    )
