"""Whether our percentiles are those that other clients measure.

`python -m loadtests.benchmarks.agreement`.

The same requests to the same server, one client after the other in an order that turns from round
to round: `wrk` beside our OIP HTTP user, `h2load` and `perf_analyzer` beside our OIP gRPC user. A
row is the median over the rounds of the ratio within each; the exit status is 1 where one is
farther from 1 than 5 % at p50 or 10 % at p99.
"""

from __future__ import annotations

import argparse
import itertools
import json
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

from loadtests import payloads, program
from loadtests.benchmarks import slow_model, tiny_model
from loadtests.benchmarks.perf_analyzer import Analyzer
from loadtests.payloads import Payloads
from loadtests.peers import clients, exchanges, models
from loadtests.peers.models import Files, Input, Model
from loadtests.peers.sample import Sample
from loadtests.peers.servers import modelport
from loadtests.peers.servers.base import Launch
from loadtests.processes import HOST, ServerFailed, free_ports, pinned, running
from loadtests.run import measure
from loadtests.samples import Load
from loadtests.summary import summarise
from loadtests.target import Protocol, Target

P50_LIMIT, P99_LIMIT = 0.05, 0.10
WARMUP_SECONDS = 0.5
OURS_HTTP, OURS_GRPC = "ours, OIP HTTP", "ours, OIP gRPC"
#: Each with the one of ours that it is compared with.
PEERS = {"wrk": OURS_HTTP, "h2load": OURS_GRPC, "perf_analyzer": OURS_GRPC}
SLOW = Model(
    slow_model.NAME,
    "slow (y = 2x after some ms)",
    (Input("x", "FP32", (1, 4), values=tiny_model.VALUES),),
    seconds=3,
    rounds=3,
)
MODELS = {model.name: model for model in (SLOW, models.ALL["fraud128"], models.ALL["fraud"])}

Drive = Callable[[int, float], Sample]


@dataclass(frozen=True)
class Row:
    """One client beside ours: each round's milliseconds, p50 and p99."""

    model: str
    in_flight: int
    peer: str
    theirs: tuple[Sample, ...]
    ours: tuple[Sample, ...]

    def ratio(self, quantile: str) -> float:
        """Ours to theirs: the median of the rounds' ratios."""
        pairs = zip(self.ours, self.theirs, strict=True)
        ratios = [getattr(o, quantile) / getattr(t, quantile) for o, t in pairs]
        return float(statistics.median(ratios))

    @property
    def agrees(self) -> bool:
        failed = any(sample.failed for sample in (*self.theirs, *self.ours))
        p50, p99 = abs(self.ratio("p50_ms") - 1), abs(self.ratio("p99_ms") - 1)
        return not failed and p50 <= P50_LIMIT and p99 <= P99_LIMIT


def parse(arguments: list[str] | None) -> argparse.Namespace:
    cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.benchmarks.agreement", description=__doc__
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--in-flight", nargs="+", type=program.count, default=[1, 8])
    parser.add_argument("--clients", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=program.count, default=5)
    parser.add_argument("--seconds", type=program.positive, default=3.0, help="of one run")
    parser.add_argument("--server-core", type=program.core, default=cores[0])
    parser.add_argument("--client-core", type=program.core, default=cores[-1])
    return parser.parse_args(arguments)


def files(model: Model, work: Path) -> Files:
    """What is served and asked; the peers' own files where there are any."""
    if model is not SLOW:
        return models.prepare(model)
    slow_model.write(work)
    tensors = model.tensors
    return Files(model, work, work, tensors, {"y": 2 * tensors["x"]})


def payload_file(found: Files, work: Path) -> Path:
    """The same one request for perf_analyzer and for us, with what must come back."""
    tolerance = models.ABSOLUTE_TOLERANCE
    made = Payloads(
        (found.tensors,), found.model.datatypes, (found.expected,), absolute_tolerance=tolerance
    )
    path = work / "requests.json"
    payloads.write(made, path)
    return path


def drives(found: Files, ports: tuple[int, int], work: Path, core: int) -> Mapping[str, Drive]:
    """Every client by name; each returns what it measured in one run."""
    http, grpc = ports
    data, name = payload_file(found, work), found.model.name
    wrk = clients.http(exchanges.oip_json(found.model), found, http, work)
    h2load = clients.grpc(found, grpc, work)
    wrk.check()
    h2load.check()

    def ours(protocol: Protocol, port: int) -> Drive:
        target = Target(protocol, f"{HOST}:{port}", name)

        def drive(in_flight: int, seconds: float) -> Sample:
            load = Load(users=in_flight, duration_seconds=seconds, warmup_seconds=WARMUP_SECONDS)
            got = summarise(measure(target, load, data, core=core))
            return Sample(got.requests_per_second, got.bad, got.latency.p50, got.latency.p99)

        return drive

    def theirs(client: clients.Client) -> Drive:
        return lambda n, seconds: client.drive(clients.Load(n, seconds, None, core))

    return {
        "wrk": theirs(wrk),
        OURS_HTTP: ours(Protocol.OIP_HTTP, http),
        "h2load": theirs(h2load),
        OURS_GRPC: ours(Protocol.OIP_GRPC, grpc),
        "perf_analyzer": perf_analyzer(name, grpc, data, work, core),
    }


def perf_analyzer(name: str, port: int, data: Path, work: Path, core: int) -> Drive:
    """Three windows, ``seconds`` together; a connection for each request in flight."""
    analyzer, report, requests = Analyzer.installed(), work / "report.csv", work / "plain.json"
    # It compares validation_data bit by bit, which no float of another kernel stands.
    # Of a model that batches it wants the shapes of one row.
    asked = json.loads(data.read_text())["data"]
    rows = [
        {name: tensor | {"shape": tensor["shape"][1:]} for name, tensor in one.items()}
        for one in asked
    ]
    requests.write_text(json.dumps({"data": rows}))

    def drive(in_flight: int, seconds: float) -> Sample:
        report.unlink(missing_ok=True)
        window = max(500, round(seconds * 1000 / 3))
        options = ["--concurrency-range", str(in_flight), "-p", str(window), "-s", "999"]
        options += ["--percentile", "99", "--input-data", str(requests), "-f", str(report)]
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


def compare(found: Files, options: argparse.Namespace, work: Path) -> list[Row]:
    """One model, served for it alone."""
    http, grpc, metrics = free_ports(3)
    launch = Launch(found.repository, work, http, grpc, metrics, model=found.model.name)
    command = modelport.command(launch)
    ready = f"http://{HOST}:{http}/v2/models/{found.model.name}/ready"
    log = work / "server.log"
    with running(
        command.arguments, log=log, ready=ready, core=options.server_core, cwd=command.cwd
    ):
        known = drives(found, (http, grpc), work, options.client_core)
        wanted = [*options.clients, *dict.fromkeys(PEERS[name] for name in options.clients)]
        runs: dict[tuple[str, int], list[Sample]] = {}
        for round_number, n in itertools.product(range(options.rounds), options.in_flight):
            turn = round_number % len(wanted)
            for name in wanted[turn:] + wanted[:turn]:
                got = known[name](n, options.seconds)
                runs.setdefault((name, n), []).append(got)
                _tell(found.model.name, round_number, n, name, got)
    return [
        Row(
            found.model.name,
            n,
            name,
            tuple(runs[name, n]),
            tuple(runs[PEERS[name], n]),
        )
        for n, name in itertools.product(options.in_flight, options.clients)
    ]


def _tell(model: str, round_number: int, in_flight: int, name: str, got: Sample) -> None:
    print(
        f"{model}, round {round_number + 1}, {in_flight} in flight, {name}: "
        f"p50 {got.p50_ms:.3f} p99 {got.p99_ms:.3f} ms, {got.requests_per_second:,.0f}/s",
        file=sys.stderr,
        flush=True,
    )


def table(rows: Sequence[Row]) -> Table:
    grid = Table("model", "in flight", "client", "p50 ms", "ours", "ratio", "p99 ms", "ours")
    for name in ("ratio", "verdict"):
        grid.add_column(name)
    for row in rows:
        cells = [row.model, str(row.in_flight), row.peer]
        for quantile in ("p50_ms", "p99_ms"):
            for samples in (row.theirs, row.ours):
                seen = statistics.median(getattr(sample, quantile) for sample in samples)
                cells += [f"{seen:.3f}"]
            cells.append(f"{row.ratio(quantile):.3f}")
        grid.add_row(*cells, "agrees" if row.agrees else "DIFFERS")
    return grid


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    rows: list[Row] = []
    for name in options.models:
        work = Path(tempfile.mkdtemp(prefix="agreement-"))
        try:
            rows += compare(files(MODELS[name], work), options, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    Console(width=120).print(table(rows))
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    program.run(main)
