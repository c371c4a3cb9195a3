"""Comparison of the load test's percentiles with those of other clients.

`python -m benchmarks.client_agreement`

The same requests go to the same server: from `wrk` and the OIP HTTP user, and from `h2load`,
`perf_analyzer` and the OIP gRPC user. In every round each client runs next to ours, alternately
before and after it, because a machine's speed drifts. A row is the mean of the per-round ratios,
without the highest and the lowest eighth, with its 95 % interval. It agrees if the ratio is within
5 % at p50 and 10 % at p99. It differs if neither the ratio nor its interval is within; then the
exit status is 1. Otherwise more rounds are needed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import script, slow_model, tiny_model
from benchmarks.peers import clients, http_formats, models
from benchmarks.peers.model import PeerInput, PeerModel
from benchmarks.peers.models import Files
from benchmarks.peers.results import PeerSample
from benchmarks.peers.servers import modelport
from benchmarks.peers.servers.base import PeerLaunch
from benchmarks.perf_analyzer import Analyzer
from benchmarks.script import pinned
from modelport.loadtests.confidence_intervals import Interval, ratio
from modelport.loadtests.load import payloads
from modelport.loadtests.load.payloads import Payloads
from modelport.loadtests.load.run import measure
from modelport.loadtests.load.samples import LoadProfile
from modelport.loadtests.load.summary import summarise
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.system.processes import HOST, ServerFailed, free_ports, running

LIMITS = {"p50_ms": 0.05, "p99_ms": 0.10}
DIFFERS = "DIFFERS"
WARMUP_SECONDS = 0.5
OURS_HTTP, OURS_GRPC = "ours, OIP HTTP", "ours, OIP gRPC"
#: Each client with the user that it is compared with.
PEERS = {"wrk": OURS_HTTP, "h2load": OURS_GRPC, "perf_analyzer": OURS_GRPC}
SLOW = PeerModel(
    slow_model.NAME,
    "slow (y = 2x after some ms)",
    (PeerInput("x", "FP32", (1, 4), values=tiny_model.VALUES),),
    seconds=3,
    rounds=3,
)
MODELS = {model.name: model for model in (SLOW, models.ALL["fraud128"], models.ALL["fraud"])}

Drive = Callable[[int, float], PeerSample]


@dataclass(frozen=True)
class AgreementRow:
    """One client beside ours: p50 and p99 of each round, in milliseconds."""

    model: str
    in_flight: int
    peer: str
    theirs: tuple[PeerSample, ...]
    ours: tuple[PeerSample, ...]

    def ratio(self, quantile: str) -> Interval:
        """The ratio of our figure to theirs."""
        ours, theirs = ([getattr(s, quantile) for s in side] for side in (self.ours, self.theirs))
        return ratio(ours, theirs)

    @property
    def verdict(self) -> str:
        if any(sample.failed for sample in (*self.theirs, *self.ours)):
            return DIFFERS
        found = [(self.ratio(name), limit) for name, limit in LIMITS.items()]
        if all(abs(seen.estimate - 1) <= limit for seen, limit in found):
            return "agrees"
        beyond = any(seen.lower > 1 + limit or seen.upper < 1 - limit for seen, limit in found)
        return DIFFERS if beyond else "undecided"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.client_agreement", description=__doc__
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[SLOW.name])
    parser.add_argument("--in-flight", nargs="+", type=script.count, default=[1, 8])
    parser.add_argument("--clients", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=script.count, default=8)
    parser.add_argument("--seconds", type=script.positive, default=2.0, help="of one run")
    parser.add_argument("--server-core", type=script.core, default=cores[0])
    parser.add_argument("--client-core", type=script.core, default=cores[-1])
    return parser.parse_args(arguments)


def files(model: PeerModel, work: Path) -> Files:
    """The served model and its request; the peers' files if they exist."""
    if model is not SLOW:
        return models.prepare(model)
    slow_model.write(work)
    tensors = model.tensors
    return Files(model, work, work, tensors, {"y": 2 * tensors["x"]})


def payload_file(found: Files, work: Path) -> Path:
    """Write the same request, with its expected answer, for perf_analyzer and for our users."""
    tolerance = models.ABSOLUTE_TOLERANCE
    made = Payloads(
        (found.tensors,),
        found.model.datatypes,
        (found.expected,),
        absolute_tolerance=tolerance,
        batch_size=1,
    )
    path = work / "requests.json"
    payloads.write(made, path)
    return path


def drives(found: Files, ports: tuple[int, int], work: Path, core: int) -> Mapping[str, Drive]:
    """Every client by name; each returns the measurements of one run."""
    http, grpc = ports
    data, name = payload_file(found, work), found.model.name
    wrk = clients.http(http_formats.oip_json(found.model), found, http, work)
    h2load = clients.grpc(found, grpc, work)
    wrk.check()
    h2load.check()

    def ours(protocol: LoadTestProtocol, port: int) -> Drive:
        target = LoadTestTarget(protocol, f"{HOST}:{port}", name)

        def drive(in_flight: int, seconds: float) -> PeerSample:
            load = LoadProfile(
                users=in_flight, duration_seconds=seconds, warmup_seconds=WARMUP_SECONDS
            )
            got = summarise(measure(target, load, data, core=core))
            return PeerSample(got.requests_per_second, got.bad, got.latency.p50, got.latency.p99)

        return drive

    def theirs(client: clients.PeerClient) -> Drive:
        return lambda n, seconds: client.drive(clients.PeerLoad(n, seconds, None, core))

    return {
        "wrk": theirs(wrk),
        OURS_HTTP: ours(LoadTestProtocol.OIP_HTTP, http),
        "h2load": theirs(h2load),
        OURS_GRPC: ours(LoadTestProtocol.OIP_GRPC, grpc),
        "perf_analyzer": perf_analyzer(name, grpc, data, work, core),
    }


def perf_analyzer(name: str, port: int, data: Path, work: Path, core: int) -> Drive:
    """Run perf_analyzer in three windows of ``seconds`` in total, one connection per request in
    flight."""
    analyzer, report = Analyzer.installed(), work / "report.csv"

    def drive(in_flight: int, seconds: float) -> PeerSample:
        report.unlink(missing_ok=True)
        window = max(500, round(seconds * 1000 / 3))
        options = ["--concurrency-range", str(in_flight), "-p", str(window), "-s", "999"]
        options += ["--percentile", "99", "--input-data", str(data), "-f", str(report)]
        done = subprocess.run(
            [str(analyzer.program), "-m", name, "-u", f"{HOST}:{port}", "-i", "grpc", *options],
            env={
                **os.environ,
                "LD_LIBRARY_PATH": analyzer.libraries,
                "TRITON_CLIENT_GRPC_CHANNEL_MAX_SHARE_COUNT": "1",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + 120,
            preexec_fn=lambda: pinned(core),
        )
        if not report.is_file():
            raise ServerFailed(f"perf_analyzer: {(done.stdout + done.stderr)[-500:]}")
        return clients.perf_analyzer_sample(report.read_text())

    return drive


def compare(found: Files, options: argparse.Namespace, work: Path) -> list[AgreementRow]:
    """Measure one model on a server of its own."""
    http, grpc, metrics = free_ports(3)
    launch = PeerLaunch(found.repository, work, http, grpc, metrics, model=found.model.name)
    command = modelport.command(launch)
    ready = f"http://{HOST}:{http}/v2/models/{found.model.name}/ready"
    log = work / "server.log"
    with running(
        command.arguments, log=log, ready=ready, cores=(options.server_core,), cwd=command.cwd
    ):
        known = drives(found, (http, grpc), work, options.client_core)
        rows = []
        for n, name in itertools.product(options.in_flight, options.clients):
            pair = (name, PEERS[name])
            runs: dict[str, list[PeerSample]] = {one: [] for one in pair}
            for round_number in range(options.rounds):
                for one in pair if round_number % 2 else reversed(pair):
                    runs[one].append(known[one](n, options.seconds))
                    _tell(found.model.name, round_number, n, one, runs[one][-1])
            rows.append(
                AgreementRow(found.model.name, n, name, *(tuple(runs[one]) for one in pair))
            )
    return rows


def _tell(model: str, round_number: int, in_flight: int, name: str, got: PeerSample) -> None:
    print(
        f"{model}, round {round_number + 1}, {in_flight} in flight, {name}: "
        f"p50 {got.p50_ms:.3f} p99 {got.p99_ms:.3f} ms, {got.requests_per_second:,.0f}/s",
        file=sys.stderr,
        flush=True,
    )


def table(rows: Sequence[AgreementRow]) -> Table:
    grid = Table("model", "in flight", "client")
    for quantile in ("p50", "p99"):
        for heading in (f"{quantile} ms", "ours", "ratio, 95 % interval"):
            grid.add_column(heading)
    grid.add_column("verdict")
    for row in rows:
        cells = [row.model, str(row.in_flight), row.peer]
        for quantile in LIMITS:
            for samples in (row.theirs, row.ours):
                seen = statistics.median(getattr(sample, quantile) for sample in samples)
                cells += [f"{seen:.3f}"]
            seen_ratio = row.ratio(quantile)
            cells.append(
                f"{seen_ratio.estimate:.3f} ({seen_ratio.lower:.3f}-{seen_ratio.upper:.3f})"
            )
        grid.add_row(*cells, row.verdict)
    return grid


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    rows: list[AgreementRow] = []
    for name in options.models:
        work = Path(tempfile.mkdtemp(prefix="agreement-"))
        try:
            rows += compare(files(MODELS[name], work), options, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    Console(width=120).print(table(rows))
    return 1 if any(row.verdict == DIFFERS for row in rows) else 0


if __name__ == "__main__":
    script.run(main)
