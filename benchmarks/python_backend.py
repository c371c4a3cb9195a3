"""Python models of the gateway beside Triton's Python backend: the same model, in one run.

`python -m benchmarks.python_backend`

The model returns its input. Both servers run all the time, and take the load in turns: `wrk` over
HTTP (JSON, and 1 MB as binary data), `h2load` over gRPC. Only ratios within one run are meaningful.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tritonclient.grpc import service_pb2 as oip

from benchmarks import copy_model, programs, script
from benchmarks.peers.servers.modelport import executable
from benchmarks.script import only
from modelport.loadtests.serving import pytriton
from modelport.loadtests.system.processes import HOST, free_ports, running

#: Requests in flight, floats, and the least ratio to Triton's rate; of p50, with one in flight.
LOADS = {"4 floats": (4, (1, 16), 1.5), "1 MB": (262_144, (1, 16), 1.0)}
_LUA = 'wrk.method = "POST"\nwrk.body = io.open("{body}", "rb"):read("*a")\n{headers}'
_GRPC = "/inference.GRPCInferenceService/ModelInfer"


_NAMES = ("modelport", "triton")


class ServedPorts(NamedTuple):
    """A server's ports."""

    http: int
    grpc: int


class LoadSample(NamedTuple):
    """Requests a second, and the median latency in ms; NaN: the client does not tell it."""

    rate: float
    p50_ms: float


@contextlib.contextmanager
def servers(work: Path, core: int | None) -> Iterator[dict[str, ServedPorts]]:
    """Both servers, each with the model."""
    models = work / "models"
    copy_model.write_triton(models)
    found = {}
    with contextlib.ExitStack() as stack:
        for name in _NAMES:
            http, grpc, metrics = free_ports(3)
            if name == "triton":
                command, environment = pytriton.serve(models, work, http, grpc, metrics)
            else:
                command = [*executable(), "serve", "--model-repository", str(models)]
                command += ["--allow-python", "--http-port", str(http), "--grpc-port", str(grpc)]
                command += ["--metrics-port", str(metrics)]
                environment = {"PYTHONPATH": ""}
            ready = f"http://{HOST}:{http}/v2/models/{copy_model.NAME}/ready"
            log = work / f"{name}.log"
            options: dict[str, Any] = {"env": environment, "cores": only(core), "must_stop": False}
            stack.enter_context(running(command, log=log, ready=ready, **options))
            found[name] = ServedPorts(http, grpc)
        yield found


def bodies(work: Path, count: int) -> tuple[Path, str, Path]:
    """A request over HTTP, its headers for wrk, and one over gRPC."""
    values, shape = [float(n % 7) for n in range(count)], [1, count]
    raw = struct.pack(f"<{count}f", *values)
    tensor = {"name": "x", "datatype": "FP32", "shape": shape}
    http, headers = work / f"{count}.http", ""
    if count > 1000:
        head = json.dumps(
            {
                "inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}],
                "parameters": {"binary_data_output": True},
            }
        ).encode()
        http.write_bytes(head + raw)
        headers = f'wrk.headers["Inference-Header-Content-Length"] = "{len(head)}"\n'
    else:
        http.write_text(json.dumps({"inputs": [{**tensor, "data": values}]}))
    request = oip.ModelInferRequest(model_name=copy_model.NAME, raw_input_contents=[raw])
    request.inputs.add(name="x", datatype="FP32", shape=shape)
    message = request.SerializeToString()
    grpc = work / f"{count}.grpc"
    grpc.write_bytes(struct.pack(">BI", 0, len(message)) + message)
    return http, headers, grpc


def over_http(url: str, body: Path, headers: str, in_flight: int, seconds: int) -> LoadSample:
    """Load a server by ``wrk``; every answer must be 200."""
    lua = body.with_suffix(".lua")
    lua.write_text(_LUA.format(body=body, headers=headers))
    wrk = programs.debian_program("wrk", "wrk")
    command = [wrk, "-t1", f"-c{in_flight}", f"-d{seconds}", "--latency", "-s", str(lua), url]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in said:
        raise SystemExit(f"requests over HTTP failed: {said}")
    rate, p50 = re.search(r"Requests/sec: *([\d.]+)", said), re.search(r"50% *([\d.]+)(\w+)", said)
    if rate is None or p50 is None:
        raise SystemExit(f"wrk said: {said}")
    return LoadSample(float(rate[1]), float(p50[1]) * {"us": 1e-3, "ms": 1, "s": 1e3}[p50[2]])


def over_grpc(port: int, body: Path, in_flight: int, seconds: int) -> LoadSample:
    h2load = programs.debian_program("h2load", "nghttp2-client")
    command = [
        h2load, "-t1", "-c1", f"-m{in_flight}", f"-D{seconds}", "-d", str(body),
        "-H", "content-type: application/grpc", "-H", "te: trailers",
        f"http://{HOST}:{port}{_GRPC}",
    ]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate = re.search(r"([\d.]+) req/s", said)
    if rate is None or " 0 failed" not in said:
        raise SystemExit(f"h2load said: {said}")
    return LoadSample(float(rate[1]), float("nan"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.python_backend")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="of each load")
    parser.add_argument("--server-core", type=int, help="pin each server to this core")
    options = parser.parse_args(arguments)
    missed = False
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder), options.server_core) as two:
        print("| load | in flight | modelport /s | Triton /s | ratio (min-max) | p50 ms |")
        print(f"{'|---' * 6}|")
        for size, (count, flights, least) in LOADS.items():
            http, headers, grpc = bodies(Path(folder), count)
            for protocol in ("HTTP", "gRPC"):
                for in_flight in flights:
                    rows: dict[str, list[LoadSample]] = {name: [] for name in two}
                    for _ in range(options.rounds):
                        for name, ports in two.items():
                            rows[name].append(
                                over_http(_url(ports), http, headers, in_flight, options.seconds)
                                if protocol == "HTTP"
                                else over_grpc(ports.grpc, grpc, in_flight, options.seconds)
                            )
                    missed |= not _holds(rows, in_flight, least)
                    print(_row(f"{size}, {protocol}", in_flight, rows), flush=True)
    return int(missed)


def _url(ports: ServedPorts) -> str:
    return f"http://{HOST}:{ports.http}/v2/models/{copy_model.NAME}/infer"


def _ratios(rows: dict[str, list[LoadSample]]) -> list[float]:
    pairs = zip(rows["modelport"], rows["triton"], strict=True)
    return [ours.rate / theirs.rate for ours, theirs in pairs]


def _holds(rows: dict[str, list[LoadSample]], in_flight: int, least: float) -> bool:
    return statistics.median(_ratios(rows)) >= (least if in_flight > 1 else 1.0)


def _row(load: str, in_flight: int, rows: dict[str, list[LoadSample]]) -> str:
    ratios = _ratios(rows)
    rates, p50 = (
        [statistics.median(getattr(each, field) for each in rows[name]) for name in _NAMES]
        for field in ("rate", "p50_ms")
    )
    return (
        f"| {load} | {in_flight} | {rates[0]:,.0f} | {rates[1]:,.0f} | "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | "
        f"{p50[0]:.3f} / {p50[1]:.3f} |"
    )


if __name__ == "__main__":
    script.run(main)
