"""The cost of traces, the access log and recorded traffic, beside a gateway without them.

The measurement is that of ``benchmarks.access``: gateways on one core, driven in turn from another,
in several starts; rates are per second of the server's CPU time.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from benchmarks.access import (
    BODY,
    IN_FLIGHT,
    BenchmarkedServers,
    ServerVariant,
    gateway,
    options,
)
from benchmarks.open_loop import OpenLoopHttpClient
from benchmarks.script import pinned
from modelport.loadtests.system.processes import HOST, free_ports

#: One of this number of requests is traced.
TRACE_RATE = 100
#: The load of the measurement of the latency, as a part of what a core answers, its rounds and
#: their duration, and the most that recording may add.
P99_LOAD, P99_ROUNDS, P99_SECONDS, P99_RATIO = 0.3, 16, 5.0, 1.1


class TraceSink(BaseHTTPRequestHandler):
    """A collector that drops what it gets."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Be quiet."""


def collect(port: int, core: int) -> None:
    """Collect until the process is ended."""
    pinned(core)
    HTTPServer((HOST, port), TraceSink).serve_forever()


def variants(folder: Path, sink: int, before: str | None) -> Sequence[ServerVariant]:
    traces = (
        *("--trace-config", "mode=opentelemetry", "--trace-config", "level=TIMESTAMPS"),
        *("--trace-config", f"rate={TRACE_RATE}"),
        *("--trace-config", f"opentelemetry,url=http://{HOST}:{sink}/v1/traces"),
    )
    made = [
        gateway("off"),
        gateway(f"{100 // TRACE_RATE}% traced", traces, 0.97),
        gateway("access log", ("--access-log", str(folder / "access.log")), 0.90),
        gateway("10% recorded", ("--record", str(folder / "records")), 0.95),
    ]
    if before is not None:
        old = gateway("before")
        start = list(old.command).index("serve")
        old = dataclasses.replace(old, command=[before, "-m", "modelport", *old.command[start:]])
        made = [old, dataclasses.replace(made[0], at_least=0.99), *made[1:]]
    return made


def p99(servers: BenchmarkedServers, folder: Path, rounds: int) -> bool:
    """Print the latency of a gateway that records, in pairs of rounds with one that does not."""
    off = gateway("off alone")
    recorded = gateway("recording", ("--record", str(folder / "records")))
    clients = {}
    for each in (off, recorded):
        address, slash, path = each.url.removeprefix("http://").partition("/")
        clients[each] = OpenLoopHttpClient(address, slash + path, BODY, [])
    ratios = []
    with servers.running([off, recorded]):
        rate = P99_LOAD * servers.drive(off, (), 1).per_cpu_second
        servers.drive(recorded, (), 1)  # warm-up
        for number in range(rounds):
            found = {}
            for each in (off, recorded) if number % 2 else (recorded, off):
                found[each] = clients[each].run(rate, P99_SECONDS).quantile(0.99)
            ratios.append(found[recorded] / found[off])
    ratio = statistics.median(ratios)
    print(
        f"p99 of {rate:.0f} requests/s while 10% are recorded: x {ratio:.2f}   at most {P99_RATIO}"
    )
    return ratio <= P99_RATIO


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--before", metavar="PYTHON", help="of an environment with another commit")
    chosen: argparse.Namespace = parser.parse_args()
    [sink] = free_ports(1)
    context = multiprocessing.get_context("fork")
    collector = context.Process(target=collect, args=(sink, chosen.client_core), daemon=True)
    collector.start()
    try:
        with tempfile.TemporaryDirectory() as name:
            servers = BenchmarkedServers(Path(name), chosen)
            print(f"requests on {IN_FLIGHT} open connections, 4 floats, HTTP/1.1", flush=True)
            kept = servers.compare(variants(Path(name), sink, chosen.before), ())
            kept &= p99(servers, Path(name), P99_ROUNDS)
    finally:
        collector.terminate()
        collector.join()
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
