"""Measure servers side by side: `python -m loadtests.peers`.

Every server runs the same 4-float model on one core, the client on another. Rounds are interleaved
(A B C, A B C, ...), so that what else the machine does falls on all alike; only ratios from one run
mean anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtests import environments, tiny_model
from loadtests.peers import clients
from loadtests.peers.servers import ALL, DEFAULT
from loadtests.peers.servers.base import Launch, Server
from loadtests.processes import HOST, ServerFailed, free_ports, running

BASELINE = "mlserver"


@dataclass(frozen=True)
class Case:
    """One cell of the table for one server: a client and how many requests are in flight."""

    protocol: str
    in_flight: int

    @property
    def title(self) -> str:
        return f"{self.protocol} c={self.in_flight}"


Results = dict[str, dict[str, list[clients.Sample]]]  # server → case title → rounds


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.peers", description=__doc__)
    parser.add_argument("--servers", nargs="+", choices=list(ALL), default=list(DEFAULT))
    parser.add_argument("--protocols", nargs="+", choices=["http", "grpc"])
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--server-core", type=int, default=cores[0])
    parser.add_argument("--client-core", type=int, default=cores[-1])
    return parser.parse_args(arguments)


@contextlib.contextmanager
def started(server: Server, repository: Path, core: int) -> Iterator[dict[str, clients.Drive]]:
    """A ready server with one checked answer per protocol, and the drives for its load."""
    work = environments.folder(f"work/{server.name}")
    http, grpc, metrics = free_ports(3)
    command = server.command(Launch(repository, work, http, grpc, metrics))
    with running(
        command.arguments,
        log=environments.folder("logs") / f"{server.name}.log",
        ready=f"http://{HOST}:{http}{server.ready_path}",
        core=core,
        env={"OMP_NUM_THREADS": "1", **command.env},
        cwd=command.cwd,
        must_stop=False,
    ):
        drives = {"http": clients.http(server, http, work)}
        if server.grpc:
            drives["grpc"] = clients.grpc(server, grpc, work)
        yield drives


def measure(options: argparse.Namespace) -> Results:
    cases = [
        Case(protocol, in_flight)
        for protocol in options.protocols or ["http", "grpc"]
        for in_flight in options.in_flight
    ]
    repository = tiny_model.repository()
    results: Results = {name: {case.title: [] for case in cases} for name in options.servers}
    with contextlib.ExitStack() as stack:
        drives = {}
        for name in options.servers:
            context = started(ALL[name], repository, options.server_core)
            drives[name] = stack.enter_context(context)
            for drive in drives[name].values():  # warm up
                drive(max(options.in_flight), 1, options.client_core)
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for case in cases:
                for name in options.servers:
                    if case.protocol in drives[name]:
                        drive = drives[name][case.protocol]
                        sample = drive(case.in_flight, options.seconds, options.client_core)
                        if not sample.requests_per_second:
                            print(f"{name}, {case.title}: no answer", file=sys.stderr)
                        results[name][case.title].append(sample)
    return results


def hardware(options: argparse.Namespace) -> dict[str, Any]:
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "server_core": options.server_core,
        "client_core": options.client_core,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def median(samples: list[clients.Sample]) -> float:
    return statistics.median(sample.requests_per_second for sample in samples)


def ratio(samples: list[clients.Sample], baseline: list[clients.Sample]) -> float:
    """The median of each round's own ratio: what slows a round slows both."""
    pairs = zip(samples, baseline, strict=True)
    return statistics.median(
        ours.requests_per_second / max(theirs.requests_per_second, 1e-9) for ours, theirs in pairs
    )


def cell(samples: list[clients.Sample], baseline: list[clients.Sample]) -> str:
    """Median requests/s (lowest-highest), ratio to the baseline, p50 / p99 milliseconds."""
    if not samples:
        return ""
    rates = [sample.requests_per_second for sample in samples]
    text = f"{median(samples):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"
    if baseline:
        text += f" **{ratio(samples, baseline):.2f}x**"
    p50 = statistics.median(sample.p50_ms for sample in samples)
    p99 = statistics.median(sample.p99_ms for sample in samples)
    text += f" {p50:.2f}/{p99:.2f} ms"
    failed = sum(sample.failed for sample in samples)
    return text + (f" FAILED {failed}" if failed else "")


def table(results: Results, machine: dict[str, Any], options: argparse.Namespace) -> str:
    titles = list(next(iter(results.values())))
    baseline = results.get(BASELINE, {})
    same = " (the same core: not a fair run)" if options.server_core == options.client_core else ""
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; servers on core "
        f"{options.server_core}, clients on core {options.client_core}{same}; load average before "
        f"{machine['load_average'][0]:.1f}. {options.rounds} interleaved rounds of "
        f"{options.seconds} s; the 4-float model, no batching. requests/s: median (lowest-highest) "
        f"**median of each round's ratio to {BASELINE}** p50/p99. HTTP is JSON by wrk, gRPC by "
        "h2load.",
        "",
        f"| server | {' | '.join(titles)} |",
        f"|---|{'---|' * len(titles)}",
    ]
    for name, cases in results.items():
        cells = [cell(cases[title], baseline.get(title, [])) for title in titles]
        lines.append(f"| {name} ({ALL[name].about}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def save(text: str, results: Results, machine: dict[str, Any], options: argparse.Namespace) -> Path:
    home = environments.folder("results")
    stem = home / time.strftime("peers-%Y%m%d-%H%M%S")
    rounds = {
        name: {title: [asdict(sample) for sample in samples] for title, samples in cases.items()}
        for name, cases in results.items()
    }
    report = {"hardware": machine, "options": vars(options), "rounds": rounds}
    stem.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    stem.with_suffix(".md").write_text(text + "\n")
    return stem.with_suffix(".json")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    machine = hardware(options)
    try:
        results = measure(options)
    except (environments.Missing, ServerFailed, clients.WrongAnswer) as error:
        print(error, file=sys.stderr)
        return 1
    text = table(results, machine, options)
    path = save(text, results, machine, options)
    print(text)
    print(f"\n{path.relative_to(environments.ROOT)}")
    every = [s for cases in results.values() for samples in cases.values() for s in samples]
    return 1 if any(sample.failed for sample in every) else 0
