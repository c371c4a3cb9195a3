"""Behaviour under ten times the capacity: `python -m benchmarks.overload`.

The phases are: capacity (closed loop), 80 % of it, 10 times as much (open loop, an even rate), and
80 % again. Latency counts from the intended time of sending, and the overload from its first
request. Over HTTP a pulse of 10 times the capacity also meets 16 clients that wait for each answer
and retry at once when refused: from 5 s after the pulse on they must not be refused. The model has
no queue policy, so all of this holds by default. With admission control off, the run is a negative
control that must fail.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tritonclient.grpc import service_pb2 as oip

from benchmarks import script, slow_model
from benchmarks.open_loop import (
    OpenLoopClient,
    OpenLoopHttpClient,
    Outcomes,
    quantile,
)
from benchmarks.peers.clients import GRPC_PATH
from benchmarks.peers.servers.modelport import executable
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, free_ports, running

OVERLOAD, LOAD = 10.0, 0.8
#: Limits that must hold.
GOODPUT, SLOWER, REFUSAL_SECONDS, RECOVERY_SECONDS = 0.9, 3.0, 0.05, 5.0
IN_FLIGHT = 4
#: Number of retrying clients, length of the pulse, seconds that the clients are watched afterwards,
#: and the share of requests that may be refused then.
CLIENTS, PULSE_SECONDS, WATCHED_SECONDS, REFUSED_AFTER_PULSE = 16, 6.0, 3.0, 0.01
OFF = 'parameters { key: "admission_control" value { string_value: "false" } }'
#: Shorter, because the negative control's queue is answered only after the overload.
CONTROL_SECONDS = 2.0


@dataclass(frozen=True)
class OverloadResult:
    """The figures of one protocol."""

    protocol: str
    admission_control: bool
    capacity: float
    goodput: float
    load_p99_seconds: float
    accepted_p99_seconds: float
    refused_p99_seconds: float
    recovery_seconds: float
    #: Of the requests of clients that retry at once; None: not measured.
    refused_after_pulse: float | None = None

    def missed(self) -> list[str]:
        """The broken limits."""
        holds = {
            f"goodput >= {GOODPUT:.0%}": self.goodput >= GOODPUT * self.capacity,
            f"p99 <= {SLOWER:.0f} x": self.accepted_p99_seconds <= SLOWER * self.load_p99_seconds,
            f"refusals < {REFUSAL_SECONDS * 1e3:.0f} ms": self.refused_p99_seconds
            < REFUSAL_SECONDS,
            f"recovery < {RECOVERY_SECONDS:.0f} s": self.recovery_seconds < RECOVERY_SECONDS,
            "normal after the pulse": (self.refused_after_pulse or 0.0) < REFUSED_AFTER_PULSE,
        }
        return [name for name, held in holds.items() if not held]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument(
        "--protocols", nargs="+", choices=["http", "grpc"], default=["http", "grpc"]
    )
    parser.add_argument("--seconds", type=script.positive, default=30.0, help="of the overload")
    parser.add_argument(
        "--load-seconds", type=script.positive, default=8.0, help="length of the other phases"
    )
    parser.add_argument("--no-control", action="store_true", help="skip the negative control")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--server-core", type=script.core, default=cores[0])
    parser.add_argument("--client-core", type=script.core, default=cores[-1])
    return parser.parse_args(arguments)


@contextlib.contextmanager
def gateway(
    work: Path, admission_control: bool, options: argparse.Namespace
) -> Iterator[tuple[str, str]]:
    """Run a gateway with `slow`; yield its HTTP and gRPC addresses."""
    models = work / f"models-{admission_control}"
    more = "" if admission_control else OFF
    subprocess.run(
        [sys.executable, "-m", "benchmarks.slow_model", str(models), more],
        check=True, cwd=environments.ROOT,
    )  # fmt: skip
    http, grpc, metrics = free_ports(3)
    command = [*executable(), "serve", "--model-repository", str(models)]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    ready = f"http://{HOST}:{http}/v2/health/ready"
    with running(command, log=work / "gateway.log", ready=ready, cores=(options.server_core,)):
        yield f"{HOST}:{http}", f"{HOST}:{grpc}"


def client(protocol: str, addresses: tuple[str, str]) -> OpenLoopClient | OpenLoopHttpClient:
    values = [1.0, 2.0, 3.0, 4.0]
    if protocol == "http":
        tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": values}
        body = json.dumps({"inputs": [tensor]}).encode()
        return OpenLoopHttpClient(addresses[0], f"/v2/models/{slow_model.NAME}/infer", body)
    request = oip.ModelInferRequest(model_name=slow_model.NAME)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(struct.pack("<4f", *values))
    return OpenLoopClient(addresses[1], GRPC_PATH, request.SerializeToString())


def recovery(after: Outcomes, limit_seconds: float) -> float:
    """The due time of the last request that failed or took longer than ``limit_seconds``."""
    bad = [due for due, took, good in after.due if not good or took > limit_seconds]
    share = len(bad) / len(after.due)
    if share < 0.01:  # as under any load
        return 0.0
    return max(bad)


def refused_after_pulse(one: OpenLoopHttpClient, rate: float) -> float:
    """Share of refused requests of retrying clients, 5 s after a pulse."""
    until = 1.0 + PULSE_SECONDS + RECOVERY_SECONDS
    with ThreadPoolExecutor(1) as thread:
        insisting = thread.submit(one.insist, CLIENTS, until + WATCHED_SECONDS)
        time.sleep(1.0)
        one.run(rate, PULSE_SECONDS)
        late = [good for when, good in insisting.result() if when > until]
    return late.count(False) / len(late)


def measure(
    protocol: str, addresses: tuple[str, str], control: bool, options: argparse.Namespace
) -> OverloadResult:
    one = client(protocol, addresses)
    one.ask()
    rate = one.saturate(IN_FLIGHT, options.load_seconds)
    load = one.run(LOAD * rate, options.load_seconds)
    seconds = CONTROL_SECONDS if control else options.seconds
    over = one.run(OVERLOAD * rate, seconds)
    load_p99 = load.quantile(0.99)
    after = one.run(LOAD * rate, max(options.load_seconds, RECOVERY_SECONDS + 1))
    one.close()
    refused = None
    if isinstance(one, OpenLoopHttpClient) and not control:
        refused = refused_after_pulse(one, OVERLOAD * rate)
    # Requests accepted at the end are answered later; they count, and so does that time.
    last = max((due + took for due, took, good in over.due if good), default=seconds)
    goodput = len(over.answered) / max(seconds, last)
    return OverloadResult(
        protocol, not control, rate, goodput, load_p99, over.quantile(0.99),
        quantile(over.failed, 0.99), recovery(after, SLOWER * load_p99), refused,
    )  # fmt: skip


def table(results: list[OverloadResult]) -> str:
    lines = [
        "| protocol | admission control | capacity | goodput at 10 x | p99 at 80 % | "
        "accepted p99 at 10 x | refusals p99 | recovery | refused 5 s after a pulse | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        missed = r.missed()
        lines.append(
            f"| {r.protocol} | {'on' if r.admission_control else 'off'} | {r.capacity:.0f}/s | "
            f"{r.goodput / r.capacity:.0%} | {r.load_p99_seconds * 1e3:.0f} ms | "
            f"{r.accepted_p99_seconds * 1e3:.0f} ms | {r.refused_p99_seconds * 1e3:.0f} ms | "
            f"{r.recovery_seconds:.1f} s | "
            f"{'-' if r.refused_after_pulse is None else f'{r.refused_after_pulse:.1%}'} | "
            f"{'misses ' + ', '.join(missed) if missed else 'holds'} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    os.sched_setaffinity(0, {options.client_core})
    work, results = Path(tempfile.mkdtemp(prefix="overload-")), []
    try:
        if not options.no_control:
            with gateway(work, False, options) as addresses:
                results.append(measure("grpc", addresses, True, options))
        for protocol in options.protocols:
            with gateway(work, True, options) as addresses:
                results.append(measure(protocol, addresses, False, options))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(table(results))
    path = environments.folder("results") / f"overload-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps([asdict(result) for result in results], indent=1))
    good = all(not r.missed() for r in results if r.admission_control)
    caught = all(r.missed() for r in results if not r.admission_control)
    return 0 if good and caught else 1


if __name__ == "__main__":
    script.run(main)
