"""A gateway under NVIDIA's perf_analyzer, unmodified.

Without `--url-http` and `--url-grpc` it starts `modelport serve` on free ports with a tiny model,
and again with mutual TLS.
Every run must end with exit status 0 and without error messages; this script's exit status says
whether all did.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import programs, tiny_model
from benchmarks import script as program
from benchmarks.peers.servers import modelport
from benchmarks.peers.servers.base import PeerLaunch
from benchmarks.server_certificate import certificate
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, free_ports, running, wait_ready

VERSION = "2.51.0"  # the last version whose binary runs on glibc 2.36
RUN_SECONDS = 120
TROUBLE = re.compile(
    r"error|fail|exception|unexpected|unable|invalid|aborted|refused|could not|not found", re.I
)
# Messages about the steadiness of figures, not about the server; and that its client for TorchServe
# does not record the time at which a file was sent.
NO_TROUBLE = re.compile(
    r"Failed to obtain stable measurement|Failed Request Count: 0\b|Send time from \d+ to 0\.|"
    # Its threads write concurrently: the end of the line may be on another.
    r"Failed to update context stat:\s*$",
    re.I,
)
# The client's windows and the server's statistics are not read at the same instant.
COUNT_TOLERANCE, COUNT_SLACK = 0.05, 64
JSON = ("--input-tensor-format", "json", "--output-tensor-format", "json")
SHARED_MEMORY = ("--shared-memory", "system", "--output-shared-memory-size", "4096")


@dataclass(frozen=True)
class AnalyzerCase:
    """One kind of client.

    ``counted``: it reads the server's own statistics. ``uploads``: it sends files unchanged.
    ``extension``: an extension that the server must offer.
    """

    name: str
    protocol: str
    options: tuple[str, ...] = ()
    counted: bool = True
    uploads: bool = False
    extension: str = ""


CASES = (
    AnalyzerCase("HTTP JSON", "http", JSON),
    AnalyzerCase("HTTP binary", "http"),
    AnalyzerCase("gRPC", "grpc"),
    AnalyzerCase("gRPC streaming", "grpc", ("--streaming",)),
    AnalyzerCase("HTTP, shared memory", "http", SHARED_MEMORY, extension="system_shared_memory"),
    AnalyzerCase("gRPC, shared memory", "grpc", SHARED_MEMORY, extension="system_shared_memory"),
    AnalyzerCase(
        "gRPC streaming, shared memory",
        "grpc",
        ("--streaming", *SHARED_MEMORY),
        extension="system_shared_memory",
    ),
    # In this dialect a batch of one would need `--shape`, as the batch is an ordinary dimension.
    AnalyzerCase(
        "TensorFlow Serving, batch 2", "grpc", ("--service-kind", "tfserving", "-b", "2"), False
    ),
    AnalyzerCase("TorchServe", "http", ("--service-kind", "torchserve"), False, uploads=True),
)


TLS_CASES = (
    AnalyzerCase("HTTP binary, mutual TLS", "http"),
    AnalyzerCase("gRPC, mutual TLS", "grpc"),
)


def tls_options(protocol: str, pair: tuple[Path, Path]) -> tuple[str, ...]:
    """The options for a certificate that is its own authority, and the client's too."""
    certificate, key = map(str, pair)
    if protocol == "grpc":
        return (
            "--ssl-grpc-use-ssl",
            *("--ssl-grpc-root-certifications-file", certificate),
            *("--ssl-grpc-certificate-chain-file", certificate),
            *("--ssl-grpc-private-key-file", key),
        )
    return (
        *("--ssl-https-verify-peer", "1", "--ssl-https-verify-host", "2"),
        *("--ssl-https-ca-certificates-file", certificate),
        *("--ssl-https-client-certificate-file", certificate),
        *("--ssl-https-client-certificate-type", "PEM"),
        *("--ssl-https-private-key-file", key, "--ssl-https-private-key-type", "PEM"),
    )


@dataclass(frozen=True)
class AnalyzedGateway:
    """A gateway under test; ``tls`` is its certificate and key."""

    url_http: str
    url_grpc: str
    tls: tuple[Path, Path] | None = None

    def url(self, protocol: str) -> str:
        if protocol == "grpc":
            return self.url_grpc
        return self.url_http if self.tls is None else f"https://{self.url_http}"

    def options(self, protocol: str) -> tuple[str, ...]:
        return () if self.tls is None else tls_options(protocol, self.tls)

    def has(self, extension: str) -> bool:
        """Whether ``/v2`` lists the extension; perf_analyzer does not check."""
        if not extension:
            return True
        with urllib.request.urlopen(f"http://{self.url_http}/v2") as reply:
            return extension in json.load(reply)["extensions"]


@dataclass(frozen=True)
class AnalyzerRun:
    """The messages and figures of one run of perf_analyzer."""

    problems: list[str]
    requests_per_second: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0


@dataclass(frozen=True)
class Analyzer:
    """The installed binary and its libraries."""

    program: Path
    libraries: str

    @classmethod
    def installed(cls) -> Analyzer:
        requirements = (f"tritonclient=={VERSION}", "nvidia-cuda-runtime-cu12")
        bin_folder = environments.venv("perf_analyzer", *requirements, dependencies=False)
        cuda = next(bin_folder.parent.rglob("libcudart.so*")).parent
        base64 = programs.debian_library("libb64-0d")
        return cls(bin_folder / "perf_analyzer", f"{cuda}:{base64}")

    def run(self, arguments: list[str], report: Path) -> tuple[int, str]:
        report.unlink(missing_ok=True)
        done = subprocess.run(
            [str(self.program), *arguments, "-f", str(report)],
            env={**os.environ, "LD_LIBRARY_PATH": self.libraries},
            cwd=report.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_SECONDS,
        )
        # one after the other, so that lines stay whole
        return done.returncode, f"{done.stdout}\n{done.stderr}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.perf_analyzer", description=__doc__)
    parser.add_argument("--url-http", help="HOST:PORT of a gateway that is already running")
    parser.add_argument("--url-grpc", help="HOST:PORT of its gRPC side")
    parser.add_argument("--model", default=tiny_model.NAME)
    parser.add_argument("--concurrency", nargs="+", type=program.count, default=[1, 16])
    parser.add_argument(
        "--window-ms", type=program.count, default=1000, help="one measurement window"
    )
    parser.add_argument("extra", nargs="*", help="after --: further options for perf_analyzer")
    options = parser.parse_args(arguments)
    if bool(options.url_http) != bool(options.url_grpc):
        parser.error("--url-http and --url-grpc go together")
    return options


@contextlib.contextmanager
def gateway(
    options: argparse.Namespace, tls: tuple[Path, Path] | None = None
) -> Iterator[AnalyzedGateway]:
    """The gateway named on the command line, or a new one, perhaps with mutual TLS."""
    if options.url_http:
        wait_ready(f"http://{options.url_http}/v2/health/ready", None, None)
        yield AnalyzedGateway(options.url_http, options.url_grpc)
        return
    http, grpc, metrics = free_ports(3)
    work = environments.folder("work/perf_analyzer")
    command = modelport.command(PeerLaunch(tiny_model.repository(), work, http, grpc, metrics))
    log = environments.folder("logs") / "perf_analyzer-gateway.log"
    arguments = [*command.arguments, "--allow-client-shm", "true"]
    ready = f"http://{HOST}:{http}/v2/health/ready"
    if tls is not None:
        certificate, key = map(str, tls)
        arguments += ["--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", certificate]
        # the probe has no certificate
        arguments += ["--tls-client-auth", "optional"]
        ready = f"https://{HOST}:{http}/v2/health/ready"
    with running(arguments, log=log, ready=ready, cwd=command.cwd):
        yield AnalyzedGateway(f"{HOST}:{http}", f"{HOST}:{grpc}", tls)


def measure(
    analyzer: Analyzer,
    target: AnalyzedGateway,
    case: AnalyzerCase,
    concurrency: int,
    options: argparse.Namespace,
) -> AnalyzerRun:
    home = environments.folder("work/perf_analyzer")
    name = re.sub(r"\W+", "_", case.name.lower())
    report = home / f"{name}-{concurrency}.csv"
    arguments = ["-m", options.model, "-u", target.url(case.protocol), "-i", case.protocol]
    arguments += ["--concurrency-range", str(concurrency), "-p", str(options.window_ms)]
    # Accept any three windows: a shared machine never steadies within the default 10 percent.
    arguments += ["-s", "999", "--percentile", "99", *case.options, *options.extra]
    arguments += target.options(case.protocol)
    if case.uploads:
        arguments += ["--input-data", str(upload(home))]
    try:
        status, text = analyzer.run(arguments, report)
    except subprocess.TimeoutExpired as error:
        return AnalyzerRun([f"no end after {RUN_SECONDS} s: {error.output!r}"])
    report.with_suffix(".txt").write_text(text)
    problems = trouble(text, case.counted)
    if status:
        problems.insert(0, f"exit status {status}")
    if not report.is_file():
        return AnalyzerRun([*problems, "no report written"])
    with report.open(newline="") as lines:
        row = next(csv.DictReader(lines))
    rate = float(row["Inferences/Second"])
    if rate <= 0:
        problems.append("no request succeeded")
    p50, p99 = float(row["p50 latency"]) / 1e3, float(row["p99 latency"]) / 1e3
    return AnalyzerRun(problems, rate, p50, p99)


def upload(home: Path) -> Path:
    """Write the file that lists the uploads: one row for ``tiny_model``."""
    row, names = home / "row.json", home / "uploads.json"
    row.write_text(json.dumps({"instances": [tiny_model.VALUES]}))
    names.write_text(json.dumps({"data": [{"TORCHSERVE_INPUT": [str(row)]}]}))
    return names


def trouble(text: str, counted: bool = True) -> list[str]:
    """Lines in which perf_analyzer reports a problem, and counts that differ."""
    lines = (line.strip() for line in text.splitlines())
    found = [line for line in lines if TROUBLE.search(line) and not NO_TROUBLE.search(line)]
    if not counted:
        return found
    client = re.search(r"^ *Request count: (\d+)", text, re.M)
    server = re.search(r"^ *Successful request count: (\d+)", text, re.M)
    if client is None or server is None:
        return [*found, "no request counts of the client and of the server"]
    sent, answered = int(client[1]), int(server[1])
    if abs(sent - answered) > max(COUNT_TOLERANCE * sent, COUNT_SLACK):
        found.append(f"the client counted {sent} requests, the server's statistics {answered}")
    return found


def analyze(
    analyzer: Analyzer,
    target: AnalyzedGateway,
    cases: Sequence[AnalyzerCase],
    options: argparse.Namespace,
) -> int:
    """Print a line for each case; return the number of failures."""
    failures = 0
    for case in cases:
        if not target.has(case.extension):
            print(f"| {case.name} | | not allowed there | | |")
            continue
        for concurrency in options.concurrency:
            got = measure(analyzer, target, case, concurrency, options)
            failures += bool(got.problems)
            figures = f"{got.requests_per_second:,.0f} | {got.p50_ms:.2f}"
            print(f"| {case.name} | {concurrency} | {figures} | {got.p99_ms:.2f} |")
            for problem in got.problems:
                print(f"  FAILED: {problem}")
            sys.stdout.flush()
    return failures


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    analyzer = Analyzer.installed()
    print("| client | in flight | inferences/s | p50 ms | p99 ms |\n|---|---|---|---|---|")
    with gateway(options) as target:
        failures = analyze(analyzer, target, CASES, options)
    if not options.url_http:
        folder = environments.folder("work/perf_analyzer")
        with gateway(options, certificate(folder)) as target:
            failures += analyze(analyzer, target, TLS_CASES, options)
    print(f"perf_analyzer {VERSION}: {failures} failed" if failures else "perf_analyzer: no error")
    return 1 if failures else 0


if __name__ == "__main__":
    program.run(main)
