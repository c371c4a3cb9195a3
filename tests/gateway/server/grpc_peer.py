"""A gRPC listener with a few methods, and a client that is written frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import hpack
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import NotFound, TimedOut
from modelport.gateway.protocols.grpc_method import Method, Methods
from modelport.gateway.server.grpc.connection import GrpcListener
from modelport.gateway.server.grpc.service import Service
from modelport.gateway.server.listening_socket import bind
from modelport.gateway.types import Deadline
from modelport.gateway.wire.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
)

PATIENCE_SECONDS = 60.0
MAX_MESSAGE = 2**20
Frame = tuple[int, int, int, bytes]
REQUEST = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/probe.Probe/Echo",
    ":authority": "probe",
    "te": "trailers",
    "content-type": "application/grpc",
}
#: Through an encoder that keeps no table: the same on every connection.
SETTLED = frame(SETTINGS, 0, 0)


def of_any_size(_: object) -> None:
    """A ``bound`` of a method."""


class MethodProbe:
    """Methods, and what became of them."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.release = asyncio.Event()
        self.given = self.taken = 0

    def methods(self) -> Methods:
        rows = {
            "Echo": Method(BytesValue, BytesValue, self._echo, Operation.INFER, bound=of_any_size),
            "Health": Method(BytesValue, BytesValue, self._echo, Operation.INFER, health=True),
            "Wait": Method(BytesValue, BytesValue, self._wait, Operation.INFER),
            "Fail": Method(BytesValue, BytesValue, self._fail, Operation.INFER),
            "Late": Method(BytesValue, BytesValue, self._late, Operation.INFER),
            "Break": Method(BytesValue, BytesValue, self._break, Operation.INFER),
            "Count": Method(Int64Value, BytesValue, self._count, Operation.INFER, False, True),
            "Talk": Method(
                BytesValue, BytesValue, self._talk, Operation.INFER, True, True, bound=of_any_size
            ),
            "Slow": Method(
                BytesValue, BytesValue, self._slow, Operation.INFER, True, True, bound=of_any_size
            ),
        }
        # perf_analyzer's stream: its requests are messages with bytes in field 1, too.
        streams = {"ModelStreamInfer": rows["Talk"]}
        return {"probe.Probe": rows, "inference.GRPCInferenceService": streams}

    async def _echo(self, message: Any, _: Deadline) -> Any:
        return message

    async def _fail(self, message: Any, _: Deadline) -> Any:
        raise NotFound(message.value.decode())

    async def _late(self, _: Any, __: Deadline) -> Any:
        raise TimedOut

    async def _break(self, _: Any, __: Deadline) -> Any:
        raise ValueError("a secret")

    async def _wait(self, message: Any, _: Deadline) -> Any:
        self.begun.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return message

    async def _count(self, message: Any, _: Deadline) -> AsyncIterator[Any]:
        try:
            for number in range(message.value):
                self.given += 1
                yield BytesValue(value=bytes(10_000) + b"%d" % number)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def _talk(self, messages: AsyncIterator[Any], _: Deadline) -> AsyncIterator[Any]:
        async for message in messages:
            yield message

    async def _slow(self, messages: AsyncIterator[Any], _: Deadline) -> AsyncIterator[Any]:
        await self.release.wait()
        async for message in messages:
            self.taken += len(message.value)
        yield BytesValue(value=b"%d" % self.taken)


@contextlib.asynccontextmanager
async def listening(
    probe: MethodProbe | None = None, max_message: int = MAX_MESSAGE
) -> AsyncIterator[GrpcListener]:
    service = Service((probe or MethodProbe()).methods(), max_message)
    listener = GrpcListener(service, bind("127.0.0.1", 0, "--grpc-port"))
    await listener.start()
    try:
        yield listener
    finally:
        await listener.drain(Deadline.after(0))


class GrpcPeer:
    """The client's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.decoder = hpack.Decoder()
        self.seen: list[Frame] = []
        self._next = 1

    def send(self, *contents: bytes) -> None:
        self.writer.write(b"".join(contents))

    async def read(self) -> Frame:
        """The next frame; IncompleteReadError at the end."""
        head = await within(self.reader.readexactly(9))
        (length,) = struct.unpack(">I", b"\0" + head[:3])
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        got = (kind, flags, stream, await within(self.reader.readexactly(length)))
        self.seen.append(got)
        return got

    async def until(self, *kinds: int, stream: int | None = None) -> Frame:
        """The next frame of these kinds, on ``stream``."""
        while True:
            got = await self.read()
            if got[0] in kinds and stream in (None, got[2]):
                return got

    def ask(self, message: bytes = b"a", **changes: str) -> int:
        """A whole call; its stream."""
        stream, self._next = self._next, self._next + 2
        content = BytesValue(value=message).SerializeToString()
        self.send(head(stream, **changes), frame(DATA, END_STREAM, stream, prefixed(content)))
        return stream

    async def answer(self, stream: int) -> tuple[bytes, Mapping[str, str]]:
        """The data and the last headers of ``stream``."""
        data, fields = b"", {}
        while True:
            kind, flags, _, payload = await self.until(HEADERS, DATA, RST_STREAM, stream=stream)
            assert kind != RST_STREAM, f"reset with {payload!r}"
            if kind == DATA:
                data += payload
            else:
                fields = dict(self.decoder.decode(payload))
            if flags & END_STREAM:
                return data, fields

    async def code(self, kind: int = GOAWAY) -> int:
        """The error code of the next GOAWAY or RST_STREAM."""
        *_, payload = await self.until(kind)
        (code,) = struct.unpack_from(">I", payload, 4 if kind == GOAWAY else 0)
        return int(code)

    async def serves(self) -> None:
        """It is answered a call."""
        data, fields = await self.answer(self.ask(b"still there"))
        assert data[5:] == BytesValue(value=b"still there").SerializeToString()
        assert fields == {"grpc-status": "0"}


class Wire(asyncio.Transport):
    """A transport without a socket that keeps the bytes written to it."""

    family = socket.AF_INET

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.writes = 0
        self.ended = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self if name == "socket" else default

    def setsockopt(self, *_: int) -> None: ...

    def fileno(self) -> int:
        return 3

    def write(self, data: object) -> None:
        assert not self.ended
        self.writes += 1
        self.written += data  # type: ignore[operator]

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.ended

    def writelines(self, parts: Iterable[object]) -> None:
        for part in parts:
            self.write(part)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True


async def within(answer: Any) -> Any:
    return await asyncio.wait_for(answer, PATIENCE_SECONDS)


@contextlib.asynccontextmanager
async def connected(port: int, greeting: bytes = PREFACE + SETTLED) -> AsyncIterator[GrpcPeer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    peer = GrpcPeer(reader, writer)
    peer.send(greeting)
    try:
        yield peer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def block(fields: Mapping[str, str] | list[tuple[str, str]]) -> bytes:
    """Header fields, none of them kept in a table."""
    rows = fields.items() if isinstance(fields, Mapping) else fields
    encoder = hpack.Encoder()
    return bytes(encoder.encode([(*row, True) for row in rows], huffman=False))


def head(stream: int, flags: int = END_HEADERS, **changes: str) -> bytes:
    """``method`` stands for ``:method``, ``content_type`` for ``content-type``."""
    renamed = {
        f":{key}" if f":{key}" in REQUEST else key.replace("_", "-"): value
        for key, value in changes.items()
    }
    return frame(HEADERS, flags, stream, block({**REQUEST, **renamed}))


def prefixed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message
