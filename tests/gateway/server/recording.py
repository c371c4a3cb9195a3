"""Frames that real clients send, recorded once: `python -m tests.gateway.server.recording`.

Each client talks to a server through a relay that keeps what the client sends. The recordings are
replayed against one connection without a socket (``test_grpc_limits.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import subprocess
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
from google.protobuf.wrappers_pb2 import BytesValue

from benchmarks import perf_analyzer, programs, tiny_model
from modelport.gateway.wire.http2.frames import (
    DATA,
    FRAME_BYTES,
    PREFACE,
)
from tests.gateway.server.grpc_peer import MAX_MESSAGE, listening, prefixed
from tests.server import serving

FOLDER = Path(__file__).parent / "recorded"
#: Above ``MAX_IDLE_FRAMES``: with one frame a message that pays for nothing the limit is reached.
MESSAGES = 2500
SMALL = BytesValue(value=bytes(16)).SerializeToString()
LARGE = BytesValue(value=bytes(MAX_MESSAGE // 2)).SerializeToString()
UNLIMITED = [("grpc.max_receive_message_length", -1)]


# -- clients --------------------------------------------------------------------------------------


def core_stream(port: int) -> None:
    """grpc's C++ core: a stream, one message in flight."""
    asked: queue.Queue[bytes | None] = queue.Queue()
    asked.put(SMALL)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        talk = channel.stream_stream("/probe.Probe/Talk")
        for number, _ in enumerate(talk(iter(asked.get, None), timeout=60), 1):
            asked.put(SMALL if number < MESSAGES else None)


def core_unary(port: int) -> None:
    """grpc's C++ core: one call after the other."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        echo = channel.unary_unary("/probe.Probe/Echo")
        for _ in range(MESSAGES):
            echo(SMALL, timeout=10)


def core_large(port: int) -> None:
    """grpc's C++ core: long messages, which it takes through small windows."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", UNLIMITED) as channel:
        echo = channel.unary_unary("/probe.Probe/Echo")
        for _ in range(20):
            assert echo(LARGE, timeout=10) == LARGE


def core_cancels(port: int) -> None:
    """grpc's C++ core: calls that are cancelled beside calls that are answered."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        wait, echo = (channel.unary_unary(f"/probe.Probe/{name}") for name in ("Wait", "Echo"))
        for _ in range(MESSAGES // 2):
            given_up = wait.future(SMALL, timeout=10)
            echo(SMALL, timeout=10)
            given_up.cancel()


def aio_stream(port: int) -> None:
    """grpc.aio: a stream, one message in flight."""

    async def run() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            talk = channel.stream_stream("/probe.Probe/Talk")(timeout=60)
            for _ in range(MESSAGES):
                await talk.write(SMALL)
                await talk.read()
            await talk.done_writing()

    asyncio.run(run())


def nghttp2_unary(port: int) -> None:
    """nghttp2: calls at full speed, eight at a time."""
    with tempfile.NamedTemporaryFile() as body:
        body.write(prefixed(SMALL))
        body.flush()
        command = [programs.debian_program("h2load", "nghttp2-client"), f"-n{MESSAGES}"]
        command += ["-c1", "-m8", "-d", body.name, "-H", "te: trailers"]
        command += ["-H", "content-type: application/grpc"]
        done = subprocess.run(
            [*command, f"http://127.0.0.1:{port}/probe.Probe/Echo"], capture_output=True, text=True
        )
    assert f"{MESSAGES} succeeded" in done.stdout, done.stdout


def perf_analyzer_stream(port: int) -> None:
    """perf_analyzer: the streams of tritonclient's C++ library, sixteen messages in flight."""
    analyzer = perf_analyzer.Analyzer.installed()
    arguments = ["-m", tiny_model.NAME, "-u", f"127.0.0.1:{port}", "-i", "grpc", "--streaming"]
    arguments += ["--concurrency-range", "16", "-p", "500", "-s", "999"]
    with tempfile.TemporaryDirectory() as folder:
        status, text = analyzer.run(arguments, Path(folder) / "report.csv")
    assert status == 0, text


PROBED: tuple[Callable[[int], None], ...] = (
    core_stream, core_unary, core_large, core_cancels, aio_stream, nghttp2_unary,
)  # fmt: skip


# -- the relay ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def relay(port: int, sent: list[bytearray]) -> AsyncIterator[int]:
    """A port that leads to ``port``; what comes is kept, by connection."""

    async def copy(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                kept += data
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection("127.0.0.1", port)
        sent.append(bytearray())
        await asyncio.gather(
            copy(reader, upstream[1], sent[-1]), copy(upstream[0], writer, bytearray())
        )

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


def frames(content: bytes) -> Iterator[bytes]:
    """The frames of a connection, without the preface."""
    at = len(PREFACE)
    while at + FRAME_BYTES <= len(content):
        end = at + FRAME_BYTES + int.from_bytes(content[at : at + 3])
        yield content[at:end]
        at = end


def beginning(content: bytes) -> bytes:
    """The part of ``content`` that brings the wanted messages, and the bytes after the last."""
    kept, messages = bytearray(PREFACE), 0
    for each in frames(content):
        messages += each[3] == DATA and len(each) < 2**14
        if messages > MESSAGES:
            break
        kept += each
    return bytes(kept)


def recorded(name: str) -> bytes:
    return zlib.decompress((FOLDER / f"{name}.z").read_bytes())


async def record(client: Callable[[int], None], port: int) -> None:
    sent: list[bytearray] = []
    async with relay(port, sent) as way:
        await asyncio.to_thread(client, way)
    content = beginning(bytes(max(sent, key=len)))
    file = FOLDER / f"{client.__name__}.z"
    file.write_bytes(zlib.compress(content, 9))
    print(f"{client.__name__}: {len(content)} bytes, {file.stat().st_size} in the file")


async def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    async with listening() as server:
        for client in PROBED:
            await record(client, server.port)
    with serving(tiny_model.repository()) as gateway:
        await record(perf_analyzer_stream, gateway.grpc_port)


if __name__ == "__main__":
    asyncio.run(main())
