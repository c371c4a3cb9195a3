"""Latency that the gateway adds in front of another server.

`python -m benchmarks.hop`

The same request goes to the server directly and through a gateway in front of it, in interleaved
rounds, over gRPC, as an open loop at half of the measured capacity. Triton's protocol is measured
with a real tritonserver, TensorFlow Serving's with a second gateway. Only differences within one
run are meaningful.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
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

from benchmarks import copy_model, programs, script
from benchmarks.open_loop import CALL_SECONDS, OpenLoopClient
from benchmarks.peers.servers.modelport import executable
from benchmarks.script import only
from modelport.loadtests.serving import pytriton
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, free_ports, running

SIZES = {"4 floats": 4, "1 MB": 262_144}
#: Largest added latency by size, in milliseconds: p50, p99.
LIMITS_MS = {"4 floats": (0.3, None), "1 MB": (0.5, 1.5)}
METHODS = {
    "triton": "/inference.GRPCInferenceService/ModelInfer",
    "tfserving": "/tensorflow.serving.PredictionService/Predict",
}
#: Requests in flight while capacity is measured.
IN_FLIGHT = {"4 floats": 8, "1 MB": 4}
_DT_FLOAT = 1


@dataclass(frozen=True)
class HopRound:
    """One round of one way, in milliseconds."""

    p50_ms: float
    p99_ms: float
    requests: int
    failed: int


@dataclass(frozen=True)
class HopResult:
    """All rounds of one server and request size."""

    server: str
    size: str
    requests_per_second: float
    direct: list[HopRound]
    through: list[HopRound]

    def added(self, quantile: str) -> list[float]:
        """Latency that the gateway added in each round, in milliseconds."""
        pairs = zip(self.direct, self.through, strict=True)
        return [getattr(b, quantile) - getattr(a, quantile) for a, b in pairs]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hop", description=__doc__)
    parser.add_argument("--servers", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=script.count, default=7)
    parser.add_argument("--seconds", type=script.positive, default=4.0)
    parser.add_argument("--share", type=script.positive, default=0.5, help="of the capacity")
    parser.add_argument("--gateway-core", type=script.core, help="default: any")
    parser.add_argument("--server-core", type=script.core)
    parser.add_argument("--client-core", type=script.core)
    return parser.parse_args(arguments)


def values(length: int) -> bytes:
    return struct.pack(f"<{length}f", *range(length))


def message(server: str, length: int) -> bytes:
    content = values(length)
    if server == "triton":
        request = oip.ModelInferRequest(model_name=copy_model.NAME)
        request.inputs.add(name="x", datatype="FP32", shape=[1, length])
        request.raw_input_contents.append(content)
        return bytes(request.SerializeToString())
    shape = b"".join(_field(2, _field(1, size)) for size in (1, length))
    tensor = _field(1, _DT_FLOAT) + _field(2, shape) + _field(4, content)
    entry = _field(1, b"x") + _field(2, tensor)
    return _field(1, _field(1, copy_model.NAME.encode())) + _field(2, entry)


def _field(number: int, value: int | bytes) -> bytes:
    """One field of a protobuf message; written by hand, as no installed package has
    PredictRequest."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def check(server: str, reply: bytes, length: int) -> None:
    """Both protocols answer with the little-endian floats in one piece."""
    if values(length) not in reply:
        raise SystemExit(f"{server} answered, but not with its input")


@contextlib.contextmanager
def triton_server(work: Path, core: int | None) -> Iterator[str]:
    """A real tritonserver with `copy`; yields its gRPC address."""
    models = work / "triton"
    copy_model.write_triton(models)
    http, grpc_port, metrics = free_ports(3)
    command, environment = pytriton.serve(models, work, http, grpc_port, metrics)
    ready = f"http://{HOST}:{http}/v2/models/{copy_model.NAME}/ready"
    log = work / "triton.log"
    with running(command, log=log, ready=ready, env=environment, cores=only(core), must_stop=False):
        yield f"{HOST}:{grpc_port}"


@contextlib.contextmanager
def gateway(work: Path, name: str, core: int | None, *flags: str) -> Iterator[str]:
    http, port, metrics = free_ports(3)
    command = [*executable(), "serve", "--http-port", str(http), "--grpc-port", str(port)]
    command += ["--metrics-port", str(metrics), *flags]
    ready = f"http://{HOST}:{http}/v2/models/{copy_model.NAME}/ready"
    with running(command, log=work / f"{name}.log", ready=ready, cores=only(core)):
        yield f"{HOST}:{port}"


@contextlib.contextmanager
def both(server: str, work: Path, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The addresses of the server and of a gateway in front of it."""
    with contextlib.ExitStack() as stack:
        if server == "triton":
            direct = stack.enter_context(triton_server(work, options.server_core))
        else:
            models = work / "models"
            copy_model.write_onnx(models)
            flags = ("--model-repository", str(models))
            direct = stack.enter_context(gateway(work, "second", options.server_core, *flags))
        routes = work / "modelport.toml"
        routes.write_text(
            f'[models.{copy_model.NAME}]\nbackend = "{server}"\nendpoints = ["{direct}"]\n'
        )
        flags = ("--routes", str(routes))
        through = stack.enter_context(gateway(work, "front", options.gateway_core, *flags))
        yield direct, through


def capacity(clients: list[OpenLoopClient], seconds: float) -> float:
    """Requests per second of these clients, each with one in flight."""
    until = time.perf_counter() + seconds

    def drive(client: OpenLoopClient) -> int:
        count = 0
        while time.perf_counter() < until:
            client.ask()
            count += 1
        return count

    with ThreadPoolExecutor(len(clients)) as threads:
        return sum(threads.map(drive, clients)) / seconds


def measure(
    server: str, size: str, ways: tuple[str, str], options: argparse.Namespace
) -> HopResult:
    length, method = SIZES[size], METHODS[server]
    content = message(server, length)
    clients = [OpenLoopClient(address, method, content) for address in ways]
    for client in clients:
        check(server, client.ask(), length)
        client.one_by_one(50)
    rates = []
    for address in ways:
        many = [OpenLoopClient(address, method, content) for _ in range(IN_FLIGHT[size])]
        rates.append(capacity(many, min(3.0, options.seconds)))
        for client in many:
            client.close()
    rate = options.share * min(rates)
    print(f"{server}, {size}: direct {rates[0]:.0f}/s, through {rates[1]:.0f}/s", file=sys.stderr)
    rounds: tuple[list[HopRound], list[HopRound]] = ([], [])
    for number in range(options.rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        for way in order:
            got = clients[way].run(rate, options.seconds)
            p50, p99 = got.quantile(0.5) * 1e3, got.quantile(0.99) * 1e3
            rounds[way].append(HopRound(p50, p99, len(got.answered), len(got.failed)))
    for client in clients:
        client.close()
    return HopResult(server, size, rate, *rounds)


def client_adds(direct: str, work: Path) -> float:
    """Milliseconds by which this client's p50 exceeds h2load's, one request in flight."""
    h2load = programs.debian_program("h2load", "nghttp2-client")
    content = message("triton", SIZES["4 floats"])
    frame, log = work / "frame", work / "h2load.log"
    frame.write_bytes(struct.pack(">BI", 0, len(content)) + content)
    url = f"http://{direct}{METHODS['triton']}"
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    command = [h2load, "-c1", "-m1", "-n2000", "-d", str(frame), f"--log-file={log}"]
    subprocess.run([*command, *headers, url], check=True, capture_output=True, timeout=CALL_SECONDS)
    theirs = statistics.median(int(line.split("\t")[2]) for line in log.read_text().splitlines())
    client = OpenLoopClient(direct, METHODS["triton"], content)
    ours = client.one_by_one(2000).quantile(0.5)
    client.close()
    return ours * 1e3 - theirs / 1e3


def table(results: list[HopResult]) -> str:
    lines = [
        "| server | request | rate | direct p50 / p99 | through p50 / p99 | adds p50 (min-max) "
        "| adds p99 (min-max) | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        cells = [
            " / ".join(
                f"{statistics.median(getattr(r, q) for r in rounds):.2f}"
                for q in ("p50_ms", "p99_ms")
            )
            for rounds in (result.direct, result.through)
        ]
        for quantile in ("p50_ms", "p99_ms"):
            added = result.added(quantile)
            cells.append(f"{statistics.median(added):.2f} ({min(added):.2f}-{max(added):.2f})")
        lines.append(
            f"| {result.server} | {result.size} | {result.requests_per_second:.0f}/s | "
            f"{' | '.join(cells)} | {verdict(result)} |"
        )
    return "\n".join([*lines, "", "Milliseconds, medians of the rounds."])


def verdict(result: HopResult) -> str:
    if any(r.failed for r in (*result.direct, *result.through)):
        return "requests failed"
    pairs = zip(("p50_ms", "p99_ms"), LIMITS_MS[result.size], strict=True)
    missed = [
        quantile[:3]
        for quantile, limit in pairs
        if limit is not None and statistics.median(result.added(quantile)) > limit
    ]
    return f"misses {', '.join(missed)}" if missed else "holds"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.client_core is not None:
        os.sched_setaffinity(0, {options.client_core})
    results: list[HopResult] = []
    for server in options.servers:
        work = Path(tempfile.mkdtemp(prefix="hop-"))
        try:
            with both(server, work, options) as ways:
                if server == "triton":
                    added = client_adds(ways[0], work)
                    print(f"the client itself adds {added:.2f} ms p50 to h2load's", flush=True)
                for size in options.sizes:
                    results.append(measure(server, size, ways, options))
                    print(table(results[-1:]), flush=True)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {os.cpu_count()} cores, client on {cores} of them\n")
    print(table(results))
    path = environments.folder("results") / f"hop-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0 if all(verdict(result) == "holds" for result in results) else 1


if __name__ == "__main__":
    script.run(main)
