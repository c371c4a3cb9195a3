"""Check that the gateway's memory stays flat: `python -m benchmarks.memory`.

Requests of every kind, valid and invalid, complete and aborted, go to one gateway; its memory, its
file descriptors and its threads are read between the rounds. `--control` runs a gateway that leaks
100 bytes per request, which the check must detect.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2 as oip

from benchmarks import programs, script, tiny_model
from benchmarks.open_loop import OPTIONS
from benchmarks.peers.clients import GRPC_PATH
from benchmarks.peers.servers.modelport import executable
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, free_ports, running

#: Largest growth from the end of the warm-up to the end.
GROWTH_SHARE, GROWTH_BYTES = 0.01, 20 * 2**20
#: Share of requests that is warm-up, for allocators, caches and Python's adaptive interpreter.
WARM_UP = 0.25
CONTROL = {
    "MODELPORT_LEAK_BYTES": "100",
    "PYTHONPATH": str(environments.ROOT / "tests" / "faults" / "site"),
}
INFER = f"/v2/models/{tiny_model.NAME}/infer"
SETTLE_SECONDS = 10.0
GIVEN_UP = 100


@dataclass(frozen=True)
class MemorySample:
    """Memory, descriptors and threads after a number of requests."""

    requests: int
    resident_bytes: int
    file_descriptors: int
    threads: int


@dataclass(frozen=True)
class RequestKind:
    """Requests that `h2load` sends."""

    name: str
    share: float
    url: str
    body: bytes
    flags: tuple[str, ...] = ()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--requests", type=script.count, default=1_000_000)
    parser.add_argument("--rounds", type=script.count, default=40)
    parser.add_argument("--control", action="store_true", help="a gateway that leaks")
    return parser.parse_args(arguments)


def kinds(http: str, grpc_address: str) -> list[RequestKind]:
    values = list(tiny_model.VALUES)
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": values}
    text = json.dumps({"inputs": [tensor]}).encode()
    raw = struct.pack("<4f", *values)
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 16}}]})
    binary = head.replace(f', "data": {values}', "").encode()
    good, bad = (oip.ModelInferRequest(model_name=name) for name in (tiny_model.NAME, "no_model"))
    for request in (good, bad):
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        request.raw_input_contents.append(raw)
    frames = [struct.pack(">BI", 0, r.ByteSize()) + r.SerializeToString() for r in (good, bad)]
    h1, call = ("--h1",), ("-H", "content-type: application/grpc", "-H", "te: trailers")
    url, length = f"http://{http}{INFER}", f"inference-header-content-length: {len(binary)}"
    method = f"http://{grpc_address}{GRPC_PATH}"
    return [
        RequestKind("HTTP JSON", 0.3, url, text, h1),
        RequestKind("HTTP binary", 0.15, url, binary + raw, (*h1, "-H", length)),
        RequestKind("HTTP, not JSON", 0.05, url, b'{"inputs": [', h1),
        RequestKind("HTTP, wrong shape", 0.05, url, text.replace(b"[1, 4]", b"[1, 5]"), h1),
        RequestKind("HTTP, no such model", 0.05, f"http://{http}/v2/models/none/infer", text, h1),
        RequestKind("gRPC", 0.35, method, frames[0], call),
        RequestKind("gRPC, no such model", 0.05, method, frames[1], call),
    ]


def send(kind: RequestKind, count: int, work: Path) -> None:
    h2load = programs.debian_program("h2load", "nghttp2-client")
    body = work / "body"
    body.write_bytes(kind.body)
    command = [h2load, f"-n{count}", "-c8", "-m1", "-d", str(body), *kind.flags, kind.url]
    if "--h1" not in kind.flags:
        command[3] = "-m4"
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    if f"{count} done" not in done.stdout:
        raise SystemExit(f"{kind.name}: {done.stdout}")


def give_up(http: str, grpc_address: str) -> int:
    """Cancel calls, and close connections amid a request; return their number."""
    request = oip.ModelInferRequest(model_name=tiny_model.NAME)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(bytes(16))
    with grpc.insecure_channel(grpc_address, OPTIONS) as channel:
        call = channel.unary_unary(GRPC_PATH, None, None)
        for _ in range(GIVEN_UP):
            asked = call.future(request.SerializeToString(), timeout=5)
            asked.cancel()  # type: ignore[no-untyped-call]
    host, _, port = http.partition(":")
    head = f"POST {INFER} HTTP/1.1\r\nhost: {http}\r\ncontent-length: 1000\r\n\r\nx"
    for _ in range(GIVEN_UP):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode())
    return 2 * GIVEN_UP


def processes(parent: int) -> Iterator[int]:
    """Yield ``parent`` and all of its descendants."""
    yield parent
    for child in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in child.read_text().split():
            yield from processes(int(pid))


def sample(parent: int, requests: int) -> MemorySample:
    resident = threads = files = 0
    for pid in processes(parent):
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        resident += int(status["VmRSS"].split()[0]) * 1024
        threads += int(status["Threads"])
        files += len(os.listdir(f"/proc/{pid}/fd"))
    return MemorySample(requests, resident, files, threads)


def settled(parent: int, requests: int, before: MemorySample) -> MemorySample:
    """Sample once the connections of the last round are gone, or after a time limit."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        now = sample(parent, requests)
        if now.file_descriptors <= before.file_descriptors or time.monotonic() > until:
            return now
        time.sleep(0.1)


def growth(samples: list[MemorySample]) -> float:
    """The rise in bytes of the regression line from the first to the last sample."""
    xs, ys = [s.requests for s in samples], [s.resident_bytes for s in samples]
    return statistics.linear_regression(xs, ys).slope * (xs[-1] - xs[0])


def verdict(samples: list[MemorySample]) -> list[str]:
    """The broken limits. The first sample is taken after one request of each kind."""
    warm = [s for s in samples if s.requests >= WARM_UP * samples[-1].requests]
    grown, missed = growth(warm), []
    if grown >= min(GROWTH_BYTES, GROWTH_SHARE * warm[0].resident_bytes):
        missed.append(f"memory grew by {grown / 2**20:.1f} MiB")
    if warm[-1].file_descriptors > warm[0].file_descriptors:
        missed.append(f"{warm[-1].file_descriptors - warm[0].file_descriptors} more descriptors")
    if warm[-1].threads > warm[0].threads:
        missed.append(f"{warm[-1].threads - warm[0].threads} more threads")
    return missed


def measure(options: argparse.Namespace, work: Path) -> list[MemorySample]:
    http, grpc_port, metrics = free_ports(3)
    command = [*executable(), "serve", "--model-repository", str(tiny_model.repository())]
    command += ["--http-port", str(http), "--grpc-port", str(grpc_port)]
    command += ["--metrics-port", str(metrics)]
    ready = f"http://{HOST}:{http}/v2/health/ready"
    env = CONTROL if options.control else {}
    with running(command, log=work / "gateway.log", ready=ready, env=env) as process:
        addresses = f"{HOST}:{http}", f"{HOST}:{grpc_port}"
        every, sent = kinds(*addresses), 0
        samples: list[MemorySample] = []
        first = settled(process.pid, 0, sample(process.pid, 0))
        for number in range(options.rounds):
            for kind in every:
                count = max(8, int(kind.share * options.requests / options.rounds))
                send(kind, count, work)
                sent += count
            sent += give_up(*addresses)
            samples.append(settled(process.pid, sent, samples[0] if samples else first))
            last = samples[-1]
            print(
                f"{number + 1}/{options.rounds}: {sent} requests, "
                f"{last.resident_bytes / 2**20:.1f} MiB, {last.file_descriptors} descriptors, "
                f"{last.threads} threads", file=sys.stderr, flush=True,
            )  # fmt: skip
    return samples


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="memory-") as work:
        samples = measure(options, Path(work))
    missed = verdict(samples)
    path = environments.folder("results") / f"memory-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps([asdict(s) for s in samples], indent=1))
    warm = [s for s in samples if s.requests >= WARM_UP * samples[-1].requests]
    print(
        f"{samples[-1].requests} requests: {warm[0].resident_bytes / 2**20:.1f} MiB after the "
        f"warm-up, {growth(warm) / 2**20:+.2f} MiB since; {'; '.join(missed) or 'flat'}"
    )
    return 0 if bool(missed) is options.control else 1


if __name__ == "__main__":
    script.run(main)
