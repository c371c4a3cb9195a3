"""Throughput gain of a second worker, on two cores that the clients share.

Clients take time from the server's cores, so requests per second say little. Instead, the processor
time of the server's own processes per request is counted: with one worker that shares a core with
the client, and with N workers, each on one of the first N cores, with clients on any core. N
otherwise idle cores would answer N / (seconds per request); the scaling is that value divided by
the one for a single worker. It includes everything that workers cost each other: caches, memory,
the kernel, the parent. The busiest worker's share of the time is shown too, as a check that load
reaches all workers evenly.

Rounds are interleaved and start with either in turn; the table has medians and their spread.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import script
from benchmarks.peers import clients, http_formats, models
from benchmarks.peers.clients import PeerClient, PeerLoad
from benchmarks.peers.servers.modelport import executable
from modelport.loadtests.system.processes import HOST, free_ports, running

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
GOAL = 1.7  # for two workers, and proportionally for more


@dataclass(frozen=True)
class ScaledGateway:
    """A gateway's ``processes``: the parent first, if there is one, then the workers."""

    workers: int
    processes: list[int]
    clients: dict[str, PeerClient]
    client_core: int | None

    def cpu_seconds(self) -> list[float]:
        return [_cpu_seconds(process) for process in self.processes]


@dataclass(frozen=True)
class ScalingRound:
    """One round with one number of workers."""

    requests_per_second: float
    cpu_us_per_request: float
    busiest_share: float


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def _children(process: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _pin(process: int, core: int) -> None:
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})


@contextlib.contextmanager
def gateway(workers: int, work: Path) -> Iterator[ScaledGateway]:
    """Run a gateway whose workers have a core each."""
    files = models.prepare(models.ALL["x2"])
    http, grpc, metrics = free_ports(3)
    flags = {"http-port": http, "grpc-port": grpc, "metrics-port": metrics}
    command = [*executable(), "serve", "--model-repository", str(files.repository)]
    for name, value in {**flags, "workers": workers}.items():
        command += [f"--{name}", str(value)]
    ready = f"http://{HOST}:{http}/v2/health/ready"
    folder = work / str(workers)
    folder.mkdir()
    with running(command, log=folder / "log", ready=ready) as process:
        # The parent, the workers in the order of their start, and then a spare.
        found = [process.pid, *_children(process.pid)[:workers]]
        for core, worker in enumerate(found[-workers:]):
            _pin(worker, core)
        asked = {
            "http": clients.http(http_formats.oip_json(files.model), files, http, folder),
            "grpc": clients.grpc(files, grpc, folder),
        }
        for client in asked.values():
            client.check()
        yield ScaledGateway(workers, found, asked, 0 if workers == 1 else None)


def measure(
    gateway: ScaledGateway, protocol: str, connections: int, seconds: float
) -> ScalingRound:
    before = gateway.cpu_seconds()
    load = PeerLoad(connections, seconds, None, gateway.client_core)
    sample = gateway.clients[protocol].drive(load)
    used = [now - then for now, then in zip(gateway.cpu_seconds(), before, strict=True)]
    if sample.failed:
        raise SystemExit(f"{sample.failed} requests failed with {gateway.workers} workers")
    workers = used[-gateway.workers :]
    requests = sample.requests_per_second * seconds
    return ScalingRound(
        sample.requests_per_second, sum(used) / requests * 1e6, max(workers) / sum(workers)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument("--workers", type=script.count, default=2)
    parser.add_argument("--connections", type=script.count, default=64)
    parser.add_argument("--seconds", type=script.count, default=5, help="of each run")
    parser.add_argument("--rounds", type=script.count, default=5)
    given = parser.parse_args()
    cores = os.cpu_count() or 1
    if cores < max(2, given.workers):
        raise SystemExit(f"{given.workers} workers need a core each, and there are {cores}")
    missed = False
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pair = [
            stack.enter_context(gateway(workers, Path(folder))) for workers in (1, given.workers)
        ]
        for protocol in ("http", "grpc"):
            rounds: dict[int, list[ScalingRound]] = {each.workers: [] for each in pair}
            for number in range(given.rounds):
                for each in pair if number % 2 else reversed(pair):
                    done = measure(each, protocol, given.connections, given.seconds)
                    rounds[each.workers].append(done)
            missed |= report(protocol, rounds)
    return int(missed)


def report(protocol: str, rounds: dict[int, list[ScalingRound]]) -> bool:
    """Print a table; return whether the goal is missed."""
    costs = {
        workers: [round.cpu_us_per_request for round in each] for workers, each in rounds.items()
    }
    one = statistics.median(costs[1])
    print(f"\n{protocol}, median of {len(costs[1])} rounds")
    print("| workers | requests/s, clients beside | CPU us/request | busiest | scaling |")
    print("|--:|--:|--:|--:|--:|")
    scaling = 1.0
    for workers, each in rounds.items():
        rate = statistics.median(round.requests_per_second for round in each)
        cost = statistics.median(costs[workers])
        busiest = statistics.median(round.busiest_share for round in each)
        scaling = workers * one / cost
        spread = f"{min(costs[workers]):.1f}-{max(costs[workers]):.1f}"
        print(
            f"| {workers} | {rate:,.0f} | {cost:.1f} ({spread}) | {busiest:.0%} | {scaling:.2f} |"
        )
    goal = GOAL * workers / 2
    if scaling < goal:
        print(f"missed: {scaling:.2f} is less than {goal:.2f}")
    return scaling < goal


if __name__ == "__main__":
    script.run(main)
