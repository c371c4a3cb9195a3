"""The two neutral clients: wrk for HTTP, h2load for gRPC. The same for every server."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loadtests import environments, tiny_model
from loadtests.peers.servers.base import INSIDE, Server
from loadtests.processes import HOST, ServerFailed, pinned

GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
SLACK_SECONDS = 30
DATA_TOLERANCE = 0.02  # answers under way when the time is up are counted on one side only


class WrongAnswer(RuntimeError):
    """A server answered, but not with 2x: its speed means nothing."""


@dataclass(frozen=True)
class Sample:
    """One run of one client against one server."""

    requests_per_second: float
    failed: int
    p50_ms: float
    p99_ms: float


Drive = Callable[[int, float, int | None], Sample]  # in flight, seconds, core


def _client(command: list[str], seconds: float, core: int | None) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + SLACK_SECONDS,
        preexec_fn=lambda: pinned(core),
    )
    if done.returncode:
        said = done.stdout + done.stderr
        raise ServerFailed(f"{command[0]} ended with {done.returncode}: {said}")
    return done.stdout


def http(server: Server, port: int, work: Path) -> Drive:
    """Check one answer, then return the drive for the load."""
    url = f"http://{HOST}:{port}{server.infer_path}"
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, server.request, headers)) as reply:
        answer = server.answer(json.load(reply))
    if answer != list(tiny_model.ANSWER):
        raise WrongAnswer(f"{server.name} over HTTP: {answer}")
    body = work / "request.json"
    body.write_bytes(server.request)
    wrk = environments.debian_program("wrk", "wrk")
    script = str(Path(__file__).with_name("post.lua"))

    def drive(in_flight: int, seconds: float, core: int | None) -> Sample:
        options = ["-t1", f"-c{in_flight}", f"-d{seconds:.0f}s", "-s", script]
        text = _client([wrk, *options, url, "--", str(body)], seconds, core)
        line = next(line for line in text.splitlines() if line.startswith("JSON "))
        got = json.loads(line.removeprefix("JSON "))
        rate = (got["requests"] - got["failed"]) / got["seconds"]
        return Sample(rate, got["failed"], got["p50_us"] / 1e3, got["p99_us"] / 1e3)

    return drive


def grpc(server: Server, port: int, work: Path) -> Drive:
    """Check one answer and its grpc-status, then return the drive for the load.

    h2load sees HTTP status only, and a gRPC error is HTTP 200 without data. So the bytes of data
    must come to one correct answer per request.
    """
    frame = work / "request.grpc"
    python = str(environments.venv("probe", "tritonclient[grpc]") / "python")
    probe = str(INSIDE / "grpc_probe.py")
    command = [python, probe, f"{HOST}:{port}", str(frame)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongAnswer(f"{server.name} over gRPC: {done.stderr[-1000:]}")
    size = int(done.stdout)
    h2load = environments.debian_program("h2load", "nghttp2-client")

    def drive(in_flight: int, seconds: float, core: int | None) -> Sample:
        # connections x streams: a client library multiplexes, but not everything on one connection
        connections = max(1, in_flight // 4)
        with tempfile.NamedTemporaryFile(dir=work) as log:
            options = [f"-c{connections}", f"-m{in_flight // connections}", f"-D{seconds:.0f}"]
            options += ["-t1", "-d", str(frame), f"--log-file={log.name}"]
            options += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
            text = _client([h2load, *options, f"http://{HOST}:{port}{GRPC_PATH}"], seconds, core)
            return h2load_sample(text, Path(log.name).read_text(), size)

    return drive


def h2load_sample(text: str, log: str, answer_bytes: int) -> Sample:
    """Read h2load's summary and its log of (start, status, microseconds)."""
    rows = [line.split("\t") for line in log.splitlines()]
    times = sorted(int(row[2]) for row in rows if row[1] == "200")
    counts = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", text)
    rate = re.search(r"finished in [\d.]+\w+, ([\d.]+) req/s", text)
    data = re.search(r"\((\d+)\) data", text)
    if counts is None or rate is None or data is None:
        raise ServerFailed(f"h2load said: {text}")
    if not times:
        return Sample(0.0, max(len(rows), 1), 0.0, 0.0)
    succeeded = int(counts[1])
    failed = max(sum(int(counts[n]) for n in (2, 3, 4)), len(rows) - len(times))
    without_data = succeeded - int(data[1]) / answer_bytes
    if abs(without_data) > max(DATA_TOLERANCE * succeeded, 64):
        failed += round(abs(without_data))
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    good = 1 - min(failed, len(rows)) / len(rows)
    return Sample(float(rate[1]) * good, failed, p50 / 1e3, p99 / 1e3)
