"""Measure servers side by side: `python -m modelport.loadtests.peers`.

Every server serves the same model files on one core, the client runs on another. Rounds are
interleaved (A B C, C B A, ...), so that what else the machine does falls on all alike; all servers
but the one that is measured are stopped (SIGSTOP). Only ratios from one run mean anything.

The environments of the servers are made once, under `.peers/`. A server that cannot be installed,
does not start or answers wrongly stands in the table with the reason, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelport.loadtests import environments, program
from modelport.loadtests.peers import lineup, models, raw, readme, results
from modelport.loadtests.peers.clients import Load
from modelport.loadtests.peers.lineup import TROUBLE, Entrant
from modelport.loadtests.peers.models import Files, Model
from modelport.loadtests.peers.progress import Progress
from modelport.loadtests.peers.results import LOOP, Case, Results, Row
from modelport.loadtests.peers.sample import Sample
from modelport.loadtests.peers.servers import ALL
from modelport.loadtests.peers.servers.base import Server
from modelport.loadtests.processes import ServerFailed
from modelport.loadtests.report import blocks

PLOTS = Path("docs/benchmarks")
#: What a start takes, and the checks before every run: for the estimate only.
START_SECONDS, CHECK_SECONDS = 5.0, 0.3
WARM_UP_SECONDS = 1.0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m modelport.loadtests.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [raw.NAME, *ALL]
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
        help=f"of those that a model is asked in: {', '.join(protocols)}",
    )
    parser.add_argument(
        "--in-flight",
        nargs="+",
        type=program.count,
        metavar="N",
        help="[default: the model's, of 1 and 16]",
    )
    parser.add_argument(
        "--rounds", type=program.count, metavar="N", help="[default: the model's, 3 or 4]"
    )
    parser.add_argument(
        "--seconds",
        type=program.count,
        metavar="N",
        help="of one run [default: the model's, 2 to 8]",
    )
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--server-core", type=program.core, default=cores[0], metavar="CORE")
    parser.add_argument("--client-core", type=program.core, default=cores[-1], metavar="CORE")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write tables and plots between its markers"
    )
    parser.add_argument(
        "--plots",
        type=Path,
        default=environments.ROOT / PLOTS,
        metavar="FOLDER",
        help=f"where --page puts the plots [default: {PLOTS}]",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="RESULTS.json",
        help="measure nothing: make the report from an earlier run's file",
    )
    return parser.parse_args(arguments)


def cases(model: Model, server: Server, options: argparse.Namespace) -> list[Case]:
    """How a server is loaded with a model."""
    loads = options.in_flight or model.in_flight
    if (server.batching or server.apart) and model.baseline != raw.NAME:
        return []  # nothing to gain where nothing is computed
    if server.batching:
        loads = [max(loads)]  # batches form where many requests wait
    found = []
    for protocol in model.protocols:
        known = {
            **dict.fromkeys(server.encodings, True),
            "grpc": server.grpc,
            "perf_analyzer": server.perf_analyzer,
        }
        if protocol in options.protocols and known.get(protocol):
            # perf_analyzer is a second witness, not another measurement.
            wanted = [max(loads)] if protocol == "perf_analyzer" else loads
            found += [Case(protocol, load) for load in wanted]
        if found and model.one_protocol:
            break
    return found


def planned(model: Model, name: str, options: argparse.Namespace) -> list[Case]:
    """The cells of one row."""
    if name == raw.NAME:
        return [Case(LOOP, batch) for batch in model.batch_sizes]
    return cases(model, ALL[name], options)


def estimate(options: argparse.Namespace) -> float:
    """Seconds that the whole run will take, environments and models made."""
    total = 0.0
    for model in chosen(options):
        runs = 0
        for name in options.servers:
            runs += len(planned(model, name, options))
            total += START_SECONDS
        total += runs * model.rounds * (model.seconds + CHECK_SECONDS)
    return total


def chosen(options: argparse.Namespace) -> Iterator[Model]:
    """The models as the options want them measured."""
    for name in options.models:
        yield models.ALL[name].timed(options.rounds, options.seconds)


def measure_model(
    model: Model, options: argparse.Namespace, rows: dict[str, Row], progress: Progress
) -> None:
    """Fill ``rows``, one for each server; what goes wrong with a server goes into its row."""
    files = models.prepare(model)
    with contextlib.ExitStack() as stack:
        entrants: dict[str, Entrant] = {}
        for name in options.servers:
            if not planned(model, name, options):
                continue
            row = rows[name] = Row(raw.ABOUT if name == raw.NAME else ALL[name].about)
            if name == raw.NAME:
                continue
            progress.say(f"{model.name}: starting {name}")
            wanted = dict.fromkeys(case.protocol for case in planned(model, name, options))
            try:
                cores = options.server_core, options.client_core
                context = lineup.started(ALL[name], files, wanted, *cores)
                entrants[name] = stack.enter_context(context)
                warm_up(model, entrants[name], options.client_core)
            except TROUBLE as error:
                row.missing = str(error)
                entrants.pop(name, None)
                progress.trouble(f"{name} with {model.name}: {error}")
        for number in range(model.rounds):
            names = [name for name in rows if name == raw.NAME or name in entrants]
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


def warm_up(model: Model, entrant: Entrant, core: int) -> None:
    """A run of each protocol that does not count: what is compiled at first use, is now.

    A model that takes long for an answer has had its checks.
    """
    if model.answers is not None:
        return
    with entrant.awake():
        for protocol, client in entrant.clients.items():
            if protocol != "perf_analyzer":
                client.drive(Load(max(model.in_flight), WARM_UP_SECONDS, None, core))


def schedule(model: Model, names: list[str], options: argparse.Namespace) -> list[tuple[Case, str]]:
    """The runs of one round: the same case of all servers next to each other."""
    wanted = {name: planned(model, name, options) for name in names}
    every = dict.fromkeys(case for name in names for case in wanted[name])
    return [(case, name) for case in every for name in names if case in wanted[name]]


def run(
    model: Model,
    files: Files,
    name: str,
    case: Case,
    entrants: dict[str, Entrant],
    options: argparse.Namespace,
) -> Sample:
    if case.protocol == LOOP:
        core, answers = options.server_core, model.answers
        return raw.run(files.onnx, files.request, case.load, model.seconds, answers, core)
    entrant = entrants[name]
    with entrant.awake():
        load = Load(case.load, model.seconds, model.answers, options.client_core)
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
    """Measure, and keep all rounds in a file, so far as they have come, whatever happens."""
    told = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    told["date"] = time.strftime("%Y-%m-%d")
    measured = Results(hardware(options), told)
    path = environments.folder("results") / time.strftime("peers-%Y%m%d-%H%M%S.json")
    progress = Progress(estimate(options))
    for model in chosen(options):
        rows = measured.models.setdefault(model.name, {})
        try:
            measure_model(model, options, rows, progress)
        finally:
            measured.save(path)
    progress.end()
    return measured, path


def loaded(path: Path) -> Results:
    """An earlier run's."""
    try:
        return Results.load(path)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise environments.Missing(f"'{path}' holds no results: {error}") from error


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Two runs at once would spoil each other's figures, and use the same folders."""
    with (environments.folder("work") / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise environments.Missing("another benchmark is running here: wait for it") from error
        yield


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.page:
        blocks.check(options.page, readme.BLOCK)
    if options.report:
        measured, path = loaded(options.report), options.report
    else:
        with alone():
            measured, path = measure(options)
    if options.page:
        print(readme.write(measured, options.page, options.plots))
    else:
        print(readme.report(measured, {}))
    print(f"\n{path}")
    return 1 if measured.failed else 0
