"""Neutral clients, the same for every server: wrk for HTTP, h2load for gRPC, perf_analyzer.

If a run ends after a number of answers instead of after seconds, h2load drives HTTP too: wrk
counts whole seconds, in which a slow model gives few answers.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import programs
from benchmarks.peers import http_formats
from benchmarks.peers.http_formats import HttpExchange
from benchmarks.peers.models import Files
from benchmarks.peers.results import PeerSample
from benchmarks.peers.servers.base import INSIDE
from benchmarks.perf_analyzer import Analyzer
from benchmarks.script import pinned
from modelport.loadtests.system.processes import HOST, ServerFailed

GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
SLACK_SECONDS = 120
REPLY_SECONDS = 60
DATA_TOLERANCE = 0.02  # answers in flight at the end are counted on one side only


class WrongAnswer(RuntimeError):
    """A server gave a wrong answer, so its speed is meaningless."""


@dataclass(frozen=True)
class PeerLoad:
    """The load of one run: for ``seconds``, or until ``answers`` have come."""

    in_flight: int
    seconds: float
    answers: int | None
    core: int | None


@dataclass(frozen=True)
class PeerClient:
    """A client of one server; ``check`` checks one answer, ``drive`` is one run."""

    check: Callable[[], None]
    drive: Callable[[PeerLoad], PeerSample]


def _run(command: list[str], load: PeerLoad, env: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=load.seconds + SLACK_SECONDS,
            env={**os.environ, **(env or {})},
            preexec_fn=lambda: pinned(load.core),
        )
    except subprocess.TimeoutExpired as error:
        raise ServerFailed(f"{command[0]}: no end after {error.timeout:.0f} s") from error
    if done.returncode:
        said = done.stdout + done.stderr
        raise ServerFailed(f"{command[0]} ended with {done.returncode}: {said[-1000:]}")
    return done.stdout


def http(exchange: HttpExchange, files: Files, port: int, work: Path) -> PeerClient:
    url = f"http://{HOST}:{port}{exchange.path}"
    body = work / "request.body"
    body.write_bytes(exchange.body)
    size = 0

    def check() -> None:
        nonlocal size
        request = urllib.request.Request(url, exchange.body, dict(exchange.headers))
        try:
            with urllib.request.urlopen(request, timeout=REPLY_SECONDS) as reply:
                answer = reply.read()
                headers = {name.lower(): value for name, value in reply.headers.items()}
        except urllib.error.HTTPError as error:
            said = error.read()[:300].decode(errors="replace")
            raise ServerFailed(f"HTTP {error.code}: {said}") from error
        except OSError as error:
            raise ServerFailed(f"{url}: {error}") from error
        size = len(answer)
        if problem := files.problem(exchange.read(answer, headers)):
            raise WrongAnswer(problem)

    def drive(load: PeerLoad) -> PeerSample:
        if load.answers is not None:
            headers = [f"{name}: {value}" for name, value in exchange.headers.items()]
            return _h2load(url, body, ["--h1"], headers, load, load.in_flight, size)
        wrk = programs.debian_program("wrk", "wrk")
        script = str(Path(__file__).with_name("post.lua"))
        # wrk accepts whole seconds only.
        options = ["-t1", f"-c{load.in_flight}", f"-d{max(1, round(load.seconds))}s", "-s", script]
        headers = [f"{name}: {value}" for name, value in exchange.headers.items()]
        return wrk_sample(_run([wrk, *options, url, "--", str(body), *headers], load))

    return PeerClient(check, drive)


def wrk_sample(text: str) -> PeerSample:
    """Read the line that post.lua prints."""
    line = next((line for line in text.splitlines() if line.startswith("JSON ")), None)
    if line is None:
        raise ServerFailed(f"wrk said: {text}")
    got = json.loads(line.removeprefix("JSON "))
    # wrk does not count refused connections as requests.
    rate = max(0, got["requests"] - got["failed"]) / got["seconds"]
    return PeerSample(rate, got["failed"], got["p50_us"] / 1e3, got["p99_us"] / 1e3)


def grpc(files: Files, port: int, work: Path) -> PeerClient:
    """h2load on gRPC.

    It sees only the HTTP status, and a gRPC error is HTTP 200 without data, so the bytes of data
    must correspond to one correct answer per request.
    """
    frame, answer = work / "request.grpc", work / "answer.grpc"
    frame.write_bytes(http_formats.oip_grpc(files.model))
    size = 0

    def check() -> None:
        nonlocal size
        program = str(INSIDE / "grpc_probe.py")
        command = [sys.executable, program, f"{HOST}:{port}", GRPC_PATH, str(frame), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerFailed(f"gRPC: {done.stderr.strip()[-300:]}")
        reply = answer.read_bytes()
        size = http_formats.GRPC_FRAME.size + len(reply)
        if problem := files.problem(http_formats.read_oip_grpc(reply)):
            raise WrongAnswer(problem)

    def drive(load: PeerLoad) -> PeerSample:
        # connections x streams: a client library multiplexes, but not everything on one connection
        connections = max(1, load.in_flight // 4)
        headers = ["content-type: application/grpc", "te: trailers"]
        url = f"http://{HOST}:{port}{GRPC_PATH}"
        return _h2load(url, frame, [], headers, load, connections, size)

    return PeerClient(check, drive)


def _h2load(
    url: str,
    body: Path,
    options: list[str],
    headers: list[str],
    load: PeerLoad,
    connections: int,
    answer_bytes: int,
) -> PeerSample:
    h2load = programs.debian_program("h2load", "nghttp2-client")
    length = [f"-D{load.seconds:g}"] if load.answers is None else [f"-n{load.answers}"]
    with tempfile.NamedTemporaryFile(dir=body.parent) as log:
        command = [h2load, *options, f"-c{connections}", f"-m{load.in_flight // connections}"]
        command += [*length, "-t1", "-d", str(body), f"--log-file={log.name}"]
        for header in headers:
            command += ["-H", header]
        text = _run([*command, url], load)
        cut_off = load.in_flight if load.answers is None else 0
        return h2load_sample(text, Path(log.name).read_text(), answer_bytes, cut_off)


def h2load_sample(text: str, log: str, answer_bytes: int, under_way: int = 0) -> PeerSample:
    """Read h2load's summary and its log of (start, status, microseconds).

    ``under_way`` is the number of requests that the end may have cut off.

    h2load reads status 0 from an HTTP/1.1 status line without a reason, as TorchServe sends. Such
    answers are right if all bytes are there.
    """
    counts = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", text)
    rate = re.search(r"finished in [\d.]+\w+, ([\d.]+) req/s", text)
    data = re.search(r"\((\d+)\) data", text)
    if counts is None or rate is None or data is None:
        raise ServerFailed(f"h2load said: {text}")
    rows = [line.split("\t") for line in log.splitlines()]
    good = {"200", "0"} if int(data[1]) == answer_bytes * len(rows) else {"200"}
    times = sorted(int(row[2]) for row in rows if row[1] in good)
    if not times:
        return PeerSample(0.0, max(len(rows), 1), 0.0, 0.0)
    unread = sum(row[1] == "0" for row in rows) if "0" in good else 0
    lost = int(counts[2]) - unread + int(counts[3]) + int(counts[4])
    failed = max(lost, len(rows) - len(times))
    succeeded = int(counts[1]) + unread
    without_data = succeeded - int(data[1]) / answer_bytes
    if abs(without_data) > DATA_TOLERANCE * succeeded + under_way:
        failed += round(abs(without_data))
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    share = 1 - min(failed, len(rows)) / len(rows)
    return PeerSample(float(rate[1]) * share, failed, p50 / 1e3, p99 / 1e3)


def perf_analyzer(files: Files, port: int, work: Path) -> PeerClient:
    """Triton's own client over gRPC; it reads the server's metadata and makes up the tensors."""
    analyzer = Analyzer.installed()
    report = work / "perf_analyzer.csv"

    def drive(load: PeerLoad) -> PeerSample:
        arguments = ["-m", files.model.name, "-u", f"{HOST}:{port}", "-i", "grpc"]
        # Accept any three windows: a shared machine never steadies within the default 10 percent.
        window = max(500, round(load.seconds * 1000 / 3))
        arguments += ["--concurrency-range", str(load.in_flight), "-p", str(window), "-s", "999"]
        arguments += ["--percentile", "99", "-f", str(report)]
        report.unlink(missing_ok=True)
        libraries = {"LD_LIBRARY_PATH": analyzer.libraries}
        text = _run([str(analyzer.program), *arguments], load, libraries)
        if not report.is_file():
            raise ServerFailed(f"perf_analyzer said: {text[-500:]}")
        return perf_analyzer_sample(report.read_text())

    return PeerClient(lambda: None, drive)


def perf_analyzer_sample(report: str) -> PeerSample:
    """Read the table that `perf_analyzer -f` writes; its latencies are in microseconds."""
    row = next(csv.DictReader(report.splitlines()), None)
    if row is None:
        raise ServerFailed("perf_analyzer wrote no row")
    rate = float(row["Inferences/Second"])
    return PeerSample(rate, 0, float(row["p50 latency"]) / 1e3, float(row["p99 latency"]) / 1e3)
