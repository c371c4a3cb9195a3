"""A server of gRPC that is written frame by frame, and a channel to it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import hpack

from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.types import Deadline
from modelport.gateway.upstream import grpc as upstream
from modelport.gateway.wire.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_WINDOW_BYTES,
    PREFACE,
    SETTINGS,
)

MESSAGE = b"what was asked"
Frame = tuple[int, int, int, bytes]
OK = [(":status", "200"), ("content-type", "application/grpc")]
TRAILERS = [("grpc-status", "0")]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def prefixed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


class Http2Peer:
    """The server's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.encoder = hpack.Encoder()
        self.seen: list[Frame] = []

    async def greet(self, *settings: tuple[int, int]) -> None:
        assert await self.reader.readexactly(len(PREFACE)) == PREFACE
        self.send(frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *each) for each in settings)))

    def send(self, content: bytes) -> None:
        self.writer.write(content)

    async def read(self) -> Frame:
        head = await self.reader.readexactly(9)
        (length,) = struct.unpack(">I", b"\0" + head[:3])
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        got = (kind, flags, stream, await self.reader.readexactly(length))
        self.seen.append(got)
        return got

    async def until(self, kind: int, flags: int = 0) -> Frame:
        """The next frame of ``kind`` with all of ``flags``."""
        while True:
            got = await self.read()
            if got[0] == kind and got[1] & flags == flags:
                return got

    def headers(self, stream: int, fields: list[tuple[str, str]], flags: int = 0) -> bytes:
        return frame(HEADERS, END_HEADERS | flags, stream, self.encoder.encode(fields))

    def reply(self, stream: int, message: bytes = MESSAGE) -> bytes:
        content = prefixed(message)
        return b"".join(
            (
                self.headers(stream, OK),
                *(
                    frame(DATA, 0, stream, content[at : at + 16_384])
                    for at in range(0, len(content), 16_384)
                ),
                self.headers(stream, TRAILERS, END_STREAM),
            )
        )


Script = Callable[[Http2Peer], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(
    script: Script,
    secured: ssl.SSLContext | None = None,
    window: int = MAX_WINDOW_BYTES,
    **keys: object,
) -> AsyncIterator[upstream.GrpcChannel]:
    """A channel to a server that does what ``script`` says on every connection."""

    handlers: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await script(Http2Peer(reader, writer))
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=secured)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    route = ModelRoute("triton", (address,), connect_timeout_seconds=2.0, **keys)  # type: ignore[arg-type]
    channel = upstream.GrpcChannel(address, route, window=window)
    try:
        yield channel
    finally:
        await channel.close()
        server.close()
        await asyncio.gather(*handlers)


async def ask(channel: upstream.GrpcChannel, message: bytes = MESSAGE) -> bytes:
    async with asyncio.timeout(60):
        return await upstream.unary(channel.method("/a.B/C"), message, bytes, Deadline.after(60))


async def answer(peer: Http2Peer) -> None:
    """Any number of calls."""
    await peer.greet()
    while True:
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        peer.send(peer.reply(stream))


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate that signs itself, for 127.0.0.1, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "upstream")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    cert, secret = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert, secret
