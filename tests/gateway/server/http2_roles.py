"""Our connections of either role, without a socket, as a hostile peer sees them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from google.protobuf.wrappers_pb2 import BytesValue

from modelport.gateway.server.grpc.connection import GrpcConnection
from modelport.gateway.server.grpc.service import Service
from modelport.gateway.server.http1.exchange import HttpServerState
from modelport.gateway.server.http2.http import Http2ServerConnection
from modelport.gateway.server.listener import ServerState
from modelport.gateway.server.listening_socket import ConnectionLimit
from modelport.gateway.upstream.http2 import ClientConnection, GrpcReply
from modelport.gateway.wire.http2.connection import Http2Connection
from modelport.gateway.wire.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    frame,
    literal,
)
from tests.gateway.server.grpc_peer import MAX_MESSAGE, REQUEST, MethodProbe, Wire, block, prefixed
from tests.gateway.server.handlers import echo_body

Rows = list[tuple[str, str]]
ASKED = prefixed(BytesValue(value=b"what was asked").SerializeToString())


class Role(ABC):
    """One of our connections. ``send`` is what its peer sends."""

    connection: Http2Connection[Any, Any]
    #: The fields with which the peer opens its side of a stream, and trailers.
    rows: ClassVar[Rows]
    trailers: ClassVar[Rows]

    def __init__(self) -> None:
        self.wire = Wire()
        self.loop = asyncio.get_running_loop()

    @abstractmethod
    def begin(self, streams: int) -> None:
        """Connect; as a client, open ``streams``, with the numbers 1, 3, 5, ..."""

    def send(self, *contents: bytes) -> None:
        self.connection.data_received(b"".join(contents))

    def head(self, stream: int, flags: int = END_HEADERS, rows: Rows | None = None) -> bytes:
        """The peer's side of a stream begins."""
        return frame(HEADERS, flags, stream, block(self.rows if rows is None else rows))

    def message(self, stream: int) -> bytes:
        """The peer's side of a stream, whole."""
        ended = frame(HEADERS, END_HEADERS | END_STREAM, stream, block(self.trailers))
        return self.head(stream) + frame(DATA, 0, stream, ASKED) + ended

    @abstractmethod
    async def serves(self, stream: int) -> bool:
        """Whether a further stream is served, of which no number is taken yet."""

    def written(self) -> list[tuple[int, int, bytes]]:
        """Type, stream and payload of the frames that our side has sent."""
        content, found = bytes(self.wire.written).removeprefix(PREFACE), []
        at = 0
        while at < len(content):
            (size,) = struct.unpack(">I", b"\0" + content[at : at + 3])
            kind, _, stream = struct.unpack(">BBI", content[at + 3 : at + 9])
            found.append((kind, stream, content[at + 9 : at + 9 + size]))
            at += 9 + size
        return found

    def go_away(self) -> int | None:
        """The error code of our GOAWAY."""
        codes = [payload[4:8] for kind, _, payload in self.written() if kind == GOAWAY]
        assert len(codes) <= 1
        return int.from_bytes(codes[0]) if codes else None

    def resets(self) -> dict[int, int]:
        """The error codes of our resets by stream."""
        return {
            stream: int.from_bytes(payload)
            for kind, stream, payload in self.written()
            if kind == RST_STREAM
        }


class ServerRole(Role):
    rows: ClassVar[Rows] = list(REQUEST.items())
    trailers: ClassVar[Rows] = [("checksum", "none")]

    def begin(self, streams: int) -> None:
        self.state = ServerState(ConnectionLimit(10**6))
        service = Service(MethodProbe().methods(), MAX_MESSAGE)
        self.connection = GrpcConnection(self.state, service, self.loop)
        self.connection.connection_made(self.wire)
        self.send(PREFACE)

    async def serves(self, stream: int) -> bool:
        self.send(self.message(stream))
        for _ in range(5):
            await asyncio.sleep(0)
        return any(found == (DATA, stream, ASKED) for found in self.written())


class ClientRole(Role):
    rows: ClassVar[Rows] = [(":status", "200"), ("content-type", "application/grpc")]
    trailers: ClassVar[Rows] = [("grpc-status", "0")]

    def begin(self, streams: int) -> None:
        self.connection = ClientConnection(self.loop)
        self.connection.connection_made(self.wire)
        self.calls = [self._call() for _ in range(streams)]

    def _call(self) -> asyncio.Task[GrpcReply]:
        fields = b"".join(literal(k.encode(), v.encode()) for k, v in REQUEST.items())
        assert isinstance(self.connection, ClientConnection)
        call = self.loop.create_task(self.connection.call(fields, (ASKED,), MAX_MESSAGE))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return call

    async def serves(self, stream: int) -> bool:
        call = self._call()
        await asyncio.sleep(0)
        self.send(self.message(self.connection.last_stream))
        with contextlib.suppress(Exception):
            return (await asyncio.wait_for(call, 1)).body.view() == ASKED
        return False


class HttpRole(ServerRole):
    rows: ClassVar[Rows] = [
        (":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "a"),
    ]  # fmt: skip

    def begin(self, streams: int) -> None:
        state = HttpServerState(echo_body, ConnectionLimit(10**6), (), (), None)
        self.connection = Http2ServerConnection(state, self.loop, False)
        self.connection.connection_made(self.wire)
        self.send(PREFACE)


ROLES: dict[str, type[Role]] = {
    "gRPC server": ServerRole,
    "HTTP server": HttpRole,
    "client": ClientRole,
}


@contextlib.asynccontextmanager
async def facing(name: str, streams: int = 1) -> AsyncIterator[Role]:
    """Our connection of this role; as a client it has opened so many streams."""
    before = asyncio.all_tasks()
    role = ROLES[name]()
    role.begin(streams)
    await asyncio.sleep(0)
    try:
        yield role
    finally:
        role.connection.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        assert not role.connection.streams


def mutated(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    content = bytearray(rng.choice(seeds))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(content))
        match rng.randrange(4):
            case 0:
                content[at] = rng.randrange(256)
            case 1:
                content[at:at] = rng.randbytes(rng.randrange(1, 12))
            case 2:
                del content[at : at + rng.randrange(1, 12)]
            case 3:
                content += rng.choice(seeds)[6:]
    return bytes(content)


def kinds(written: bytes) -> list[int]:
    """The types of the frames in ``written``, which is frames to its end."""
    found, at = [], 0
    while at < len(written):
        (size,) = struct.unpack(">I", b"\0" + written[at : at + 3])
        found.append(written[at + 3])
        at += 9 + size
    assert at == len(written)
    return found
