"""The neutral clients, the same for every server: wrk for HTTP, h2load for gRPC, perf_analyzer.

Where a run ends after a number of answers instead of after seconds, h2load drives HTTP too: wrk
counts whole seconds, and of a model that takes one for an answer it would see few.
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

from modelport.loadtests import environments
from modelport.loadtests.benchmarks.perf_analyzer import Analyzer
from modelport.loadtests.peers import exchanges
from modelport.loadtests.peers.exchanges import Exchange
from modelport.loadtests.peers.models import Files
from modelport.loadtests.peers.sample import Sample
from modelport.loadtests.peers.servers.base import INSIDE
from modelport.loadtests.processes import HOST, ServerFailed, pinned

GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
SLACK_SECONDS = 120
REPLY_SECONDS = 60
DATA_TOLERANCE = 0.02  # answers under way when the time is up are counted on one side only


class WrongAnswer(RuntimeError):
    """A server answered, but not what the model computes: its speed means nothing."""


@dataclass(frozen=True)
class Load:
    """How one run loads a server: for ``seconds``, or until ``answers`` have come."""

    in_flight: int
    seconds: float
    answers: int | None
    core: int | None


@dataclass(frozen=True)
class Client:
    """``check`` asks once and looks at the answer; ``drive`` is one run."""

    check: Callable[[], None]
    drive: Callable[[Load], Sample]


def _run(command: list[str], load: Load, env: Mapping[str, str] | None = None) -> str:
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


def http(exchange: Exchange, files: Files, port: int, work: Path) -> Client:
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

    def drive(load: Load) -> Sample:
        if load.answers is not None:
            headers = [f"{name}: {value}" for name, value in exchange.headers.items()]
            return _h2load(url, body, ["--h1"], headers, load, load.in_flight, size)
        wrk = environments.debian_program("wrk", "wrk")
        script = str(Path(__file__).with_name("post.lua"))
        # It takes whole seconds only.
        options = ["-t1", f"-c{load.in_flight}", f"-d{max(1, round(load.seconds))}s", "-s", script]
        headers = [f"{name}: {value}" for name, value in exchange.headers.items()]
        return wrk_sample(_run([wrk, *options, url, "--", str(body), *headers], load))

    return Client(check, drive)


def wrk_sample(text: str) -> Sample:
    """Read the line that post.lua prints."""
    line = next((line for line in text.splitlines() if line.startswith("JSON ")), None)
    if line is None:
        raise ServerFailed(f"wrk said: {text}")
    got = json.loads(line.removeprefix("JSON "))
    # Refused connections are failures that it does not count as requests.
    rate = max(0, got["requests"] - got["failed"]) / got["seconds"]
    return Sample(rate, got["failed"], got["p50_us"] / 1e3, got["p99_us"] / 1e3)


def grpc(files: Files, port: int, work: Path) -> Client:
    """h2load sees HTTP status only, and a gRPC error is HTTP 200 without data.

    So the bytes of data must come to one correct answer per request.
    """
    frame, answer = work / "request.grpc", work / "answer.grpc"
    frame.write_bytes(exchanges.oip_grpc(files.model))
    size = 0

    def check() -> None:
        nonlocal size
        program = str(INSIDE / "grpc_probe.py")
        command = [sys.executable, program, f"{HOST}:{port}", GRPC_PATH, str(frame), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerFailed(f"gRPC: {done.stderr.strip()[-300:]}")
        reply = answer.read_bytes()
        size = exchanges.GRPC_FRAME.size + len(reply)
        if problem := files.problem(exchanges.read_oip_grpc(reply)):
            raise WrongAnswer(problem)

    def drive(load: Load) -> Sample:
        # connections x streams: a client library multiplexes, but not everything on one connection
        connections = max(1, load.in_flight // 4)
        headers = ["content-type: application/grpc", "te: trailers"]
        url = f"http://{HOST}:{port}{GRPC_PATH}"
        return _h2load(url, frame, [], headers, load, connections, size)

    return Client(check, drive)


def _h2load(
    url: str,
    body: Path,
    options: list[str],
    headers: list[str],
    load: Load,
    connections: int,
    answer_bytes: int,
) -> Sample:
    h2load = environments.debian_program("h2load", "nghttp2-client")
    length = [f"-D{load.seconds:g}"] if load.answers is None else [f"-n{load.answers}"]
    with tempfile.NamedTemporaryFile(dir=body.parent) as log:
        command = [h2load, *options, f"-c{connections}", f"-m{load.in_flight // connections}"]
        command += [*length, "-t1", "-d", str(body), f"--log-file={log.name}"]
        for header in headers:
            command += ["-H", header]
        text = _run([*command, url], load)
        cut_off = load.in_flight if load.answers is None else 0
        return h2load_sample(text, Path(log.name).read_text(), answer_bytes, cut_off)


def h2load_sample(text: str, log: str, answer_bytes: int, under_way: int = 0) -> Sample:
    """Read h2load's summary and its log of (start, status, microseconds).

    ``under_way`` are the requests that the end of the time may have cut off.

    It reads no status from an HTTP/1.1 status line without a reason, as TorchServe's are: 0. Such
    answers are right where all the bytes are.
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
        return Sample(0.0, max(len(rows), 1), 0.0, 0.0)
    unread = sum(row[1] == "0" for row in rows) if "0" in good else 0
    lost = int(counts[2]) - unread + int(counts[3]) + int(counts[4])
    failed = max(lost, len(rows) - len(times))
    succeeded = int(counts[1]) + unread
    without_data = succeeded - int(data[1]) / answer_bytes
    if abs(without_data) > DATA_TOLERANCE * succeeded + under_way:
        failed += round(abs(without_data))
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    share = 1 - min(failed, len(rows)) / len(rows)
    return Sample(float(rate[1]) * share, failed, p50 / 1e3, p99 / 1e3)


def perf_analyzer(files: Files, port: int, work: Path) -> Client:
    """Triton's own client, over gRPC: it reads the server's metadata and makes up the tensors."""
    analyzer = Analyzer.installed()
    report = work / "perf_analyzer.csv"

    def drive(load: Load) -> Sample:
        arguments = ["-m", files.model.name, "-u", f"{HOST}:{port}", "-i", "grpc"]
        # Any three windows will do: a shared machine never steadies within the default 10 percent.
        window = max(500, round(load.seconds * 1000 / 3))
        arguments += ["--concurrency-range", str(load.in_flight), "-p", str(window), "-s", "999"]
        arguments += ["--percentile", "99", "-f", str(report)]
        report.unlink(missing_ok=True)
        libraries = {"LD_LIBRARY_PATH": analyzer.libraries}
        text = _run([str(analyzer.program), *arguments], load, libraries)
        if not report.is_file():
            raise ServerFailed(f"perf_analyzer said: {text[-500:]}")
        return perf_analyzer_sample(report.read_text())

    return Client(lambda: None, drive)


def perf_analyzer_sample(report: str) -> Sample:
    """Read the table that `perf_analyzer -f` writes; its latencies are microseconds."""
    row = next(csv.DictReader(report.splitlines()), None)
    if row is None:
        raise ServerFailed("perf_analyzer wrote no row")
    rate = float(row["Inferences/Second"])
    return Sample(rate, 0, float(row["p50 latency"]) / 1e3, float(row["p99 latency"]) / 1e3)
