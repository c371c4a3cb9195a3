"""Measure servers side by side: `python -m benchmarks.peers`.

Every server serves the same model files on one core; the client runs on another. Rounds are
interleaved (A B C, C B A, ...), so that disturbances affect all alike; all servers
but the measured one are stopped (SIGSTOP). Only ratios within one run are meaningful.

The environments of the servers are made once, under `.peers/`. A server that cannot be installed,
does not start or answers wrongly is listed with the reason, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from benchmarks import script
from benchmarks.peers import (
    document_block,
    models,
    results,
    running_servers,
    runtime_limit,
)
from benchmarks.peers.clients import PeerLoad
from benchmarks.peers.model import PeerModel
from benchmarks.peers.models import Files
from benchmarks.peers.results import LOOP, PeerCase, PeerRow, PeerSample, Results
from benchmarks.peers.running_servers import TROUBLE, RunningServer
from benchmarks.peers.servers import ALL
from benchmarks.peers.servers.base import PeerServer
from modelport.loadtests import marked_block
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import ServerFailed

PLOTS = Path("docs/benchmarks")
#: Duration of a start, and of the checks before every run, for the estimate.
START_SECONDS, CHECK_SECONDS = 5.0, 0.3
WARM_UP_SECONDS = 1.0


class BenchProgress:
    """Progress of a long run: one rewritten line on a terminal, a line per step elsewhere.

    ``total_seconds`` is the estimated duration.
    """

    def __init__(self, total_seconds: float, out: TextIO = sys.stderr) -> None:
        self._begin = time.monotonic()
        self._total = total_seconds
        self._out = out
        self._over = "\r\033[K" if out.isatty() else ""

    def say(self, what: str) -> None:
        gone = time.monotonic() - self._begin
        line = f"[{clock(gone)} of about {clock(max(gone, self._total))}] {what}"
        self._out.write(f"{self._over}{line}" if self._over else f"{line}\n")
        self._out.flush()

    def trouble(self, what: str) -> None:
        """Write a line that stays."""
        self._out.write(f"{self._over}{what}\n")
        self._out.flush()

    def end(self) -> None:
        self._out.write(self._over)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [runtime_limit.NAME, *ALL]
    parser.add_argument(
        "--servers", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(models.ALL),
        default=list(models.ALL),
        metavar="NAME",
        help="; ".join(f"{model.name}: {model.title}" for model in models.ALL.values()),
    )
    protocols = [protocol for protocol in results.PROTOCOLS if protocol != LOOP]
    parser.add_argument(
        "--protocols",
        nargs="+",
        choices=protocols,
        default=protocols,
        metavar="NAME",
        help=f"restrict the protocols: {', '.join(protocols)}",
    )
    parser.add_argument(
        "--in-flight",
        nargs="+",
        type=script.count,
        metavar="N",
        help="requests in flight [default: the model's, of 1 and 16]",
    )
    parser.add_argument(
        "--rounds", type=script.count, metavar="N", help="[default: the model's, 3 or 4]"
    )
    parser.add_argument(
        "--seconds",
        type=script.count,
        metavar="N",
        help="length of one run [default: the model's, 2 to 8]",
    )
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--server-core", type=script.core, default=cores[0], metavar="CORE")
    parser.add_argument("--client-core", type=script.core, default=cores[-1], metavar="CORE")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write tables and plots between its markers"
    )
    parser.add_argument(
        "--plots",
        type=Path,
        default=environments.ROOT / PLOTS,
        metavar="FOLDER",
        help=f"folder of the plots of --page [default: {PLOTS}]",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="RESULTS.json",
        help="measure nothing: make the report from an earlier run's file",
    )
    return parser.parse_args(arguments)


def cases(model: PeerModel, server: PeerServer, options: argparse.Namespace) -> list[PeerCase]:
    """The cases of a server with a model."""
    loads = options.in_flight or model.in_flight
    if (server.batching or server.apart) and model.baseline != runtime_limit.NAME:
        return []  # this model computes too little to gain
    if server.batching:
        loads = [max(loads)]  # batches form when many requests wait
    found = []
    for protocol in model.protocols:
        known = {
            **dict.fromkeys(server.encodings, True),
            "grpc": server.grpc,
            "perf_analyzer": server.perf_analyzer,
        }
        if protocol in options.protocols and known.get(protocol):
            # perf_analyzer is a cross-check, not another measurement.
            wanted = [max(loads)] if protocol == "perf_analyzer" else loads
            found += [PeerCase(protocol, load) for load in wanted]
        if found and model.one_protocol:
            break
    return found


def planned(model: PeerModel, name: str, options: argparse.Namespace) -> list[PeerCase]:
    """The cases of one row."""
    if name == runtime_limit.NAME:
        return [PeerCase(LOOP, batch) for batch in model.batch_sizes]
    return cases(model, ALL[name], options)


def estimate(options: argparse.Namespace) -> float:
    """Estimated seconds of the whole run; environments and models exist already."""
    total = 0.0
    for model in chosen(options):
        runs = 0
        for name in options.servers:
            runs += len(planned(model, name, options))
            total += START_SECONDS
        total += runs * model.rounds * (model.seconds + CHECK_SECONDS)
    return total


def chosen(options: argparse.Namespace) -> Iterator[PeerModel]:
    """The models with the times from the options."""
    for name in options.models:
        yield models.ALL[name].timed(options.rounds, options.seconds)


def measure_model(
    model: PeerModel, options: argparse.Namespace, rows: dict[str, PeerRow], progress: BenchProgress
) -> None:
    """Fill ``rows``, one for each server; a server's failure is recorded in its row."""
    files = models.prepare(model)
    with contextlib.ExitStack() as stack:
        entrants: dict[str, RunningServer] = {}
        for name in options.servers:
            if not planned(model, name, options):
                continue
            row = rows[name] = PeerRow(
                runtime_limit.ABOUT if name == runtime_limit.NAME else ALL[name].about
            )
            if name == runtime_limit.NAME:
                continue
            progress.say(f"{model.name}: starting {name}")
            wanted = dict.fromkeys(case.protocol for case in planned(model, name, options))
            try:
                cores = options.server_core, options.client_core
                context = running_servers.started(ALL[name], files, wanted, *cores)
                entrants[name] = stack.enter_context(context)
                warm_up(model, entrants[name], options.client_core)
            except TROUBLE as error:
                row.missing = str(error)
                entrants.pop(name, None)
                progress.trouble(f"{name} with {model.name}: {error}")
        for number in range(model.rounds):
            names = [name for name in rows if name == runtime_limit.NAME or name in entrants]
            plan = schedule(model, names, options)
            for case, name in plan if number % 2 == 0 else reversed(plan):
                row = rows[name]
                if row.missing:
                    continue
                progress.say(f"{model.name}, round {number + 1}: {name}, {case.title}")
                try:
                    sample = run(model, files, name, case, entrants, options)
                except TROUBLE as error:
                    row.missing = str(error)
                    progress.trouble(f"{name} with {model.name}, {case.title}: {error}")
                    continue
                if sample.failed:
                    progress.trouble(f"{name}, {model.name}, {case.title}: {sample.failed} failed")
                row.cases.setdefault(case, []).append(sample)


def warm_up(model: PeerModel, entrant: RunningServer, core: int) -> None:
    """Run each protocol once without counting, to compile what is compiled at first use.

    A slow model is warm after its checks.
    """
    if model.answers is not None:
        return
    with entrant.awake():
        for protocol, client in entrant.clients.items():
            if protocol != "perf_analyzer":
                client.drive(PeerLoad(max(model.in_flight), WARM_UP_SECONDS, None, core))


def schedule(
    model: PeerModel, names: list[str], options: argparse.Namespace
) -> list[tuple[PeerCase, str]]:
    """The runs of one round: the same case of all servers next to each other."""
    wanted = {name: planned(model, name, options) for name in names}
    every = dict.fromkeys(case for name in names for case in wanted[name])
    return [(case, name) for case in every for name in names if case in wanted[name]]


def run(
    model: PeerModel,
    files: Files,
    name: str,
    case: PeerCase,
    entrants: dict[str, RunningServer],
    options: argparse.Namespace,
) -> PeerSample:
    if case.protocol == LOOP:
        core, answers = options.server_core, model.answers
        return runtime_limit.run(files.onnx, files.request, case.load, model.seconds, answers, core)
    entrant = entrants[name]
    with entrant.awake():
        load = PeerLoad(case.load, model.seconds, model.answers, options.client_core)
        sample = entrant.clients[case.protocol].drive(load)
    if not sample.requests_per_second:
        raise ServerFailed(f"{case.title} in flight: no answer, {sample.failed} failed")
    return sample


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


def measure(options: argparse.Namespace) -> tuple[Results, Path]:
    """Measure, and keep all finished rounds in a file, even after a failure."""
    told = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    told["date"] = time.strftime("%Y-%m-%d")
    measured = Results(hardware(options), told)
    path = environments.folder("results") / time.strftime("peers-%Y%m%d-%H%M%S.json")
    progress = BenchProgress(estimate(options))
    for model in chosen(options):
        rows = measured.models.setdefault(model.name, {})
        try:
            measure_model(model, options, rows, progress)
        finally:
            measured.save(path)
    progress.end()
    return measured, path


def loaded(path: Path) -> Results:
    """Load an earlier run."""
    try:
        return Results.load(path)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise environments.Missing(f"'{path}' holds no results: {error}") from error


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Refuse a second benchmark at the same time, which would disturb this one."""
    with (environments.folder("work") / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise environments.Missing("another benchmark is running here: wait for it") from error
        yield


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.page:
        marked_block.check(options.page, document_block.BLOCK)
    if options.report:
        measured, path = loaded(options.report), options.report
    else:
        with alone():
            measured, path = measure(options)
    if options.page:
        print(document_block.write(measured, options.page, options.plots))
    else:
        print(document_block.report(measured, {}))
    print(f"\n{path}")
    return 1 if measured.failed else 0
