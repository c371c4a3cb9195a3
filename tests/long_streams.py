"""Long gRPC streams of unmodified clients: `make long-streams`, some twenty minutes.

Streams of a million messages by grpc's C++ core, tritonclient and grpc.aio, perf_analyzer's streams
for a minute each, and unary calls at full speed over one connection for ten minutes. Each must go
on to its end: no GOAWAY, no message lost.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as oip

from benchmarks import perf_analyzer, programs, tiny_model
from tests.server import serving

IN_FLIGHT = 64
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
UNARY = "/inference.GRPCInferenceService/ModelInfer"
ROW = np.array([tiny_model.VALUES], np.float32)


def request() -> bytes:
    message = oip.ModelInferRequest(model_name=tiny_model.NAME)
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    message.raw_input_contents.append(ROW.tobytes())
    return bytes(message.SerializeToString())


def core(address: str, messages: int) -> None:
    """grpc's C++ core: as many replies as there were messages."""
    asked: queue.Queue[bytes | None] = queue.Queue()
    content = request()
    for _ in range(IN_FLIGHT):
        asked.put(content)
    got = 0
    with grpc.insecure_channel(address) as channel:
        for got, _ in enumerate(channel.stream_stream(STREAM)(iter(asked.get, None)), 1):
            asked.put(content if got <= messages - IN_FLIGHT else None)
    assert got == messages, got


def tritonclient(address: str, messages: int) -> None:
    """``start_stream`` of tritonclient, one message in flight; a tenth of the messages."""
    replies: queue.Queue[tuple[Any, Any]] = queue.Queue()
    tensor = triton.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(ROW)
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: replies.put((result, error)))
        for _ in range(messages // 10):
            client.async_stream_infer(tiny_model.NAME, [tensor])
            _, error = replies.get(timeout=30)
            assert error is None, error
        client.stop_stream()


def aio(address: str, messages: int) -> None:
    """grpc.aio, a writer and a reader."""

    async def run() -> None:
        content, room = request(), asyncio.Semaphore(IN_FLIGHT)
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(STREAM)()

            async def write() -> None:
                for _ in range(messages):
                    await room.acquire()
                    await call.write(content)
                await call.done_writing()

            writing = asyncio.ensure_future(write())
            got = 0
            async for _ in call:
                got += 1
                room.release()
            await writing
            assert got == messages, got

    asyncio.run(run())


def analyzed(address: str, seconds: float, in_flight: int) -> None:
    """perf_analyzer's streams: three windows of a third of ``seconds``."""
    analyzer = perf_analyzer.Analyzer.installed()
    arguments = ["-m", tiny_model.NAME, "-u", address, "-i", "grpc", "--streaming"]
    arguments += ["--concurrency-range", str(in_flight), "-p", str(int(seconds / 3 * 1000))]
    with tempfile.TemporaryDirectory() as folder:
        status, text = analyzer.run([*arguments, "-s", "999"], Path(folder) / "report.csv")
    problems = perf_analyzer.trouble(text)
    assert status == 0, text
    assert not problems, problems


def unary(address: str, seconds: float, h2load: str) -> None:
    """nghttp2: unary calls over one connection, as fast as they go."""
    message = request()
    with tempfile.NamedTemporaryFile() as body:
        body.write(b"\0" + len(message).to_bytes(4) + message)
        body.flush()
        command = [h2load, f"-D{seconds:.0f}", "-c1", "-m32", "-d", body.name]
        command += ["-H", "te: trailers", "-H", "content-type: application/grpc"]
        done = subprocess.run(
            [*command, f"http://{address}{UNARY}"], capture_output=True, text=True, check=True
        )
    print("  " + next(line for line in done.stdout.splitlines() if "requests:" in line))
    assert " 0 failed, 0 errored, 0 timeout" in done.stdout, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.long_streams", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=60, help="of perf_analyzer, each")
    parser.add_argument("--unary-seconds", type=float, default=600)
    parser.add_argument("--only", nargs="+", help="names of cases")
    options = parser.parse_args()
    h2load = programs.debian_program("h2load", "nghttp2-client")
    cases: dict[str, Callable[[str], None]] = {
        "core": lambda address: core(address, options.messages),
        "aio": lambda address: aio(address, options.messages),
        "tritonclient": lambda address: tritonclient(address, options.messages),
        "perf_analyzer-1": lambda address: analyzed(address, options.seconds, 1),
        "perf_analyzer-16": lambda address: analyzed(address, options.seconds, 16),
        "unary": lambda address: unary(address, options.unary_seconds, h2load),
    }
    with serving(tiny_model.repository()) as gateway:
        for name, case in cases.items():
            if options.only is None or name in options.only:
                started = time.monotonic()
                case(gateway.grpc)
                print(f"{name}: to its end after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
