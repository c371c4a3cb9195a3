"""CPU cost of a request, layer by layer: `python -m benchmarks.profile`.

A gateway runs on one core and its clients on another, as in `benchmarks.peers`; ONNX Runtime runs
in a loop on the same core for comparison. Both are sampled (`benchmarks.cpu_sampling`), which costs
some percent, so only the shares are meaningful. `benchmarks.peers` measures throughput.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks import cpu_sampling, script
from benchmarks.cpu_sampling import LOOP, THREADS, Profile
from benchmarks.peers import models, running_servers, runtime_limit
from benchmarks.peers.clients import PeerLoad
from benchmarks.peers.models import Files
from benchmarks.peers.servers import ALL
from benchmarks.peers.tables import figure, markdown
from benchmarks.script import only
from modelport.gateway.runtime.child_process import ChildProcess
from modelport.loadtests.system.processes import ServerFailed

COMPUTING = [name for name, model in models.ALL.items() if model.baseline == runtime_limit.NAME]
SERVERS = [name for name in ALL if name.startswith("modelport-")]
#: By then the loop has created its session, and computes.
RAW_START_SECONDS = 3.0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=COMPUTING, default="fraud128")
    parser.add_argument(
        "--server", choices=SERVERS, default="modelport", help="[default: %(default)s]"
    )
    parser.add_argument("--protocol", choices=("grpc", "json", "binary"), default="grpc")
    parser.add_argument("--in-flight", type=script.count, default=16, metavar="N")
    parser.add_argument("--seconds", type=script.count, default=10, metavar="N")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--server-core", type=script.core, default=cores[0], metavar="CORE")
    parser.add_argument("--client-core", type=script.core, default=cores[-1], metavar="CORE")
    return parser.parse_args(arguments)


def gateway(files: Files, options: argparse.Namespace, folder: Path) -> Profile:
    server, cores = ALL[options.server], (options.server_core, options.client_core)
    with (
        running_servers.started(server, files, [options.protocol], *cores) as entrant,
        entrant.awake(),
    ):
        client = entrant.clients[options.protocol]
        load = PeerLoad(options.in_flight, options.seconds, None, options.client_core)

        def drive() -> int:
            sample = client.drive(load)
            return max(1, round(sample.requests_per_second * load.seconds))

        drive()  # compile everything that is compiled at first use
        return cpu_sampling.record(entrant.process, drive, folder)


def by_hand(files: Files, options: argparse.Namespace, batch: int, folder: Path) -> Profile:
    """Profile the loop without a server; a request is a row."""
    core, model, request = options.server_core, files.onnx, files.request
    rate = runtime_limit.run(model, request, batch, options.seconds, None, core).requests_per_second
    seconds = RAW_START_SECONDS + options.seconds + cpu_sampling.ATTACH_SECONDS
    command = runtime_limit.command([str(model), str(request), str(batch), str(seconds), "0"])
    process = ChildProcess(command, cores=only(core), stdout=subprocess.DEVNULL)

    def goes_on(seconds: float) -> int:
        """Wait, and return the rows computed meanwhile; the loop itself reports only at its end."""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return max(1, round(rate * seconds))
        raise ServerFailed("the raw loop ended early")

    try:
        goes_on(RAW_START_SECONDS)
        return cpu_sampling.record(
            process.pid, lambda: goes_on(options.seconds), folder, python=False
        )
    finally:
        process.kill()
        process.wait()


def report(found: Profile, hand: Profile) -> str:
    """Two tables: by library, beside the loop; and by package, for the event loop alone."""
    columns: list[Mapping[str, float]] = [
        found.libraries.get(LOOP, {}),
        found.libraries.get(THREADS, {}),
        hand.libraries.get(LOOP, {}),
    ]
    layers = {layer for column in columns for layer in column}
    most = sorted(layers, key=lambda layer: -max(column.get(layer, 0) for column in columns))
    lines = [[layer, *(_figure(column, layer) for column in columns)] for layer in most]
    lines.append(["**together**", *(f"**{figure(sum(column.values()))}**" for column in columns)])
    head = ["CPU µs per request, by library", f"gateway: {LOOP}", f"gateway: {THREADS}", "by hand"]
    packages = [[layer, figure(spent)] for layer, spent in found.packages.items()]
    rest = ["CPU µs per request, by package", f"gateway: {LOOP}"]
    return "\n\n".join((markdown(head, lines), markdown(rest, packages)))


def _figure(column: Mapping[str, float], layer: str) -> str:
    return figure(column[layer]) if layer in column else ""


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    model = models.ALL[options.model]
    files = models.prepare(model)
    batch = model.preferred_batch_size if ALL[options.server].batching else 1
    with tempfile.TemporaryDirectory() as folder:
        found = gateway(files, options, Path(folder))
        hand = by_hand(files, options, batch, Path(folder))
    print(f"{model.title}, {options.protocol}, {options.in_flight} in flight: {options.server}, ")
    print(f"{found.switches:.1f} thread switches per request; by hand at batch {batch}.\n")
    print(report(found, hand))
    return 0


if __name__ == "__main__":
    script.run(main)
