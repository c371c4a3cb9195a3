"""The HTTP/2 client of other servers, against a server that is written frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import random
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import hpack
import pytest
import uvloop

from gateway.errors import Unavailable
from gateway.routes import Route
from gateway.types import Deadline
from gateway.upstream import EndpointFailed, Failure
from gateway.upstream import grpc as upstream
from gateway.wire import http2
from gateway.wire.header_blocks import HeaderBlocks, leaves_table, text
from gateway.wire.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_CONCURRENT_STREAMS,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
)
from gateway.wire.http2_reader import Broken

MESSAGE = b"what was asked"
Frame = tuple[int, int, int, bytes]
OK = [(":status", "200"), ("content-type", "application/grpc")]
TRAILERS = [("grpc-status", "0")]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def prefixed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


class Peer:
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


Script = Callable[[Peer], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(
    script: Script, secured: ssl.SSLContext | None = None, **keys: object
) -> AsyncIterator[upstream.Channel]:
    """A channel to a server that does what ``script`` says on every connection."""

    handlers: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await script(Peer(reader, writer))
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=secured)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    route = Route("triton", (address,), connect_timeout_seconds=2.0, **keys)  # type: ignore[arg-type]
    channel = upstream.Channel(address, route)
    try:
        yield channel
    finally:
        await channel.close()
        server.close()
        await asyncio.gather(*handlers)


async def ask(channel: upstream.Channel, message: bytes = MESSAGE) -> bytes:
    async with asyncio.timeout(5):
        return await upstream.unary(channel.method("/a.B/C"), message, bytes, Deadline.after(5))


async def answer(peer: Peer) -> None:
    """Any number of calls."""
    await peer.greet()
    while True:
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        peer.send(peer.reply(stream))


async def test_a_call_is_one_grpc_message_each_way_with_its_deadline() -> None:
    seen: list[Frame] = []

    async def script(peer: Peer) -> None:
        peer.seen = seen
        await answer(peer)

    async with serving(script) as channel:
        for _ in range(3):
            assert await ask(channel) == MESSAGE
    headers = dict(hpack.Decoder().decode(next(f[3] for f in seen if f[0] == HEADERS)))
    assert headers[":path"] == "/a.B/C"
    assert headers["te"] == "trailers"
    assert 4_000_000 < int(headers["grpc-timeout"].removesuffix("u")) <= 5_000_000
    assert b"".join(f[3] for f in seen if f[0] == DATA) == prefixed(MESSAGE) * 3


async def test_a_reply_that_comes_byte_by_byte_is_the_same() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        for byte in peer.reply(stream):
            peer.send(bytes((byte,)))
            await peer.writer.drain()
            await asyncio.sleep(0)

    async with serving(script) as channel:
        assert await ask(channel) == MESSAGE


async def test_padding_continuation_and_what_is_not_known_are_taken() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        block = peer.encoder.encode(OK)
        peer.send(frame(HEADERS, 0, stream, block[:1]))
        peer.send(frame(CONTINUATION, END_HEADERS, stream, block[1:]))
        peer.send(frame(0xEE, 0, stream, b"an extension"))
        content = prefixed(MESSAGE)
        peer.send(frame(DATA, PADDED, stream, bytes((7,)) + content[:3] + bytes(7)))
        peer.send(frame(DATA, PADDED, stream, bytes((255,)) + content[3:] + bytes(255)))
        peer.send(frame(DATA, 0, stream))
        peer.send(peer.headers(stream, TRAILERS, END_STREAM))

    async with serving(script) as channel:
        assert await ask(channel) == MESSAGE


async def test_a_request_waits_for_the_windows_and_goes_on() -> None:
    large = bytes(range(256)) * 1000

    async def script(peer: Peer) -> None:
        await peer.greet()
        content = bytearray()
        while len(content) < len(large) + 5:
            kind, _, stream, payload = await peer.read()
            if kind == DATA:
                content += payload
                assert len(payload) <= 16_384
                size = struct.pack(">I", len(payload))
                peer.send(frame(WINDOW_UPDATE, 0, 0, size) + frame(WINDOW_UPDATE, 0, stream, size))
        peer.send(peer.reply(stream, bytes(content[5:])))

    async with serving(script) as channel:
        assert await ask(channel, large) == large


async def test_a_large_reply_comes_whole() -> None:
    large = bytes(range(256)) * 20_000

    async def script(peer: Peer) -> None:
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        peer.send(peer.reply(stream, large))

    async with serving(script) as channel:
        assert await ask(channel) == large


async def test_a_reply_above_the_limit_is_refused_and_its_stream_reset() -> None:
    reset: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

    async def script(peer: Peer) -> None:
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        peer.send(peer.headers(stream, OK) + frame(DATA, 0, stream, prefixed(bytes(2000))))
        reset.set_result(await peer.until(RST_STREAM))

    async with serving(script, max_reply_bytes=1000) as channel:
        with pytest.raises(EndpointFailed, match="larger than the route's max_reply_bytes"):
            await ask(channel)
        assert (await asyncio.wait_for(reset, 5))[3] == struct.pack(">I", http2.CANCEL)


async def test_a_cancelled_call_is_reset_and_the_next_goes_on_beside_it() -> None:
    asked, reset = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.until(DATA, END_STREAM)
        asked.set()
        await peer.until(RST_STREAM)
        reset.set()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        peer.send(peer.reply(stream - 2, b"too late") + peer.reply(stream))

    async with serving(script) as channel:
        given_up = asyncio.create_task(ask(channel))
        await asyncio.wait_for(asked.wait(), 5)
        given_up.cancel()
        await asyncio.wait_for(reset.wait(), 5)
        assert await ask(channel) == MESSAGE
        with pytest.raises(asyncio.CancelledError):
            await given_up


async def test_a_server_that_goes_away_finishes_what_it_took_and_gets_nothing_new() -> None:
    connections = 0

    async def script(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        if connections == 1:
            peer.send(frame(GOAWAY, 0, 0, struct.pack(">II", stream, 0)))
        peer.send(peer.reply(stream))
        if connections > 1:
            _, _, stream, _ = await peer.until(DATA, END_STREAM)
            peer.send(frame(GOAWAY, 0, 0, struct.pack(">II", stream - 2, 0)))

    async with serving(script) as channel:
        assert await ask(channel) == MESSAGE
        assert await ask(channel) == MESSAGE
        assert connections == 2
        with pytest.raises(EndpointFailed) as failed:
            await ask(channel)
        assert failed.value.failure is Failure.DROPPED


async def test_no_connection_gets_more_calls_than_it_allows() -> None:
    together = asyncio.Barrier(2)

    async def script(peer: Peer) -> None:
        await peer.greet((MAX_CONCURRENT_STREAMS, 1))
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        await together.wait()
        peer.send(peer.reply(stream))

    async with serving(script) as channel:
        assert await asyncio.gather(ask(channel), ask(channel)) == [MESSAGE, MESSAGE]


async def test_a_server_that_takes_no_calls_is_not_connected_to_again_and_again() -> None:
    connections = 0

    async def script(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        await peer.greet((MAX_CONCURRENT_STREAMS, 0))

    async with serving(script) as channel:
        with pytest.raises(EndpointFailed, match="it takes no calls") as failed:
            await ask(channel)
    assert failed.value.failure is Failure.REFUSED
    assert connections == 1


async def test_a_ping_is_answered() -> None:
    ponged = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        peer.send(frame(PING, 0, 0, b"12345678"))
        assert (await peer.until(PING, ACK))[3] == b"12345678"
        ponged.set()
        peer.send(peer.reply(stream))

    async with serving(script) as channel:
        assert await ask(channel) == MESSAGE
        assert ponged.is_set()


async def test_a_server_that_leaves_pings_unanswered_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "KEEPALIVE_SECONDS", 0.05)
    monkeypatch.setattr(upstream, "PONG_SECONDS", 0.05)

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.until(PING)

    async with serving(script) as channel:
        with pytest.raises(EndpointFailed) as failed:
            await ask(channel)
        assert failed.value.failure is Failure.DROPPED


#: What a server sends after its settings and a call, and how that fails.
BROKEN: dict[str, tuple[Callable[[Peer], bytes], Failure]] = {
    "reset": (lambda p: frame(RST_STREAM, 0, 1, struct.pack(">I", 2)), Failure.DROPPED),
    "pushed": (lambda p: frame(5, 0, 1, bytes(4)), Failure.DROPPED),
    "bad headers": (lambda p: frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff"), Failure.DROPPED),
    "interrupted": (
        lambda p: frame(HEADERS, 0, 1, b"\x88") + frame(DATA, 0, 1, b"x"),
        Failure.DROPPED,
    ),
    "too much padding": (lambda p: frame(DATA, PADDED, 1, b"\xff"), Failure.DROPPED),
    "huge frame": (lambda p: b"\xff\xff\xff\x01\x04" + bytes(4), Failure.DROPPED),
    "header flood": (lambda p: frame(HEADERS, 0, 1, bytes(16_000)) * 1
                     + frame(CONTINUATION, 0, 1, bytes(16_000)) * 100, Failure.DROPPED),
    "short settings": (lambda p: frame(SETTINGS, 0, 0, b"abc"), Failure.DROPPED),
    "no grpc": (lambda p: p.headers(1, [(":status", "200")], END_STREAM), Failure.DAMAGED),
    "http 404": (lambda p: p.headers(1, [(":status", "404")], END_STREAM), Failure.DAMAGED),
    "http 503": (lambda p: p.headers(1, [(":status", "503")], END_STREAM), Failure.UNREADY),
    "no message": (
        lambda p: p.headers(1, OK) + p.headers(1, TRAILERS, END_STREAM),
        Failure.DAMAGED,
    ),
    "compressed": (
        lambda p: p.headers(1, OK) + frame(DATA, 0, 1, b"\1\0\0\0\1x")
        + p.headers(1, TRAILERS, END_STREAM),
        Failure.DAMAGED,
    ),
    "two messages": (
        lambda p: p.headers(1, OK) + frame(DATA, 0, 1, prefixed(b"a") * 2)
        + p.headers(1, TRAILERS, END_STREAM),
        Failure.DAMAGED,
    ),
    "not serving": (
        lambda p: p.headers(1, [*OK, ("grpc-status", "14")], END_STREAM),
        Failure.UNREADY,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
async def test_a_server_that_breaks_the_protocol_fails_the_call_at_once(case: str) -> None:
    make, failure = BROKEN[case]

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.until(DATA, END_STREAM)
        peer.send(make(peer))

    async with serving(script) as channel:
        with pytest.raises(EndpointFailed) as failed:
            await ask(channel)
    assert failed.value.failure is failure


@pytest.mark.parametrize(
    "greeting", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b""]
)
async def test_a_server_of_another_protocol_is_refused_as_one(greeting: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readexactly(len(PREFACE))
        peer.send(greeting)
        peer.writer.close()

    async with serving(script) as channel:
        with pytest.raises(EndpointFailed, match="it does not speak gRPC") as failed:
            await ask(channel)
    assert failed.value.failure is Failure.REFUSED


async def test_a_connection_that_ends_as_it_begins_fails_the_call_at_once() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        peer.writer.close()

    async with serving(script) as channel:
        with pytest.raises(EndpointFailed) as failed:
            await ask(channel)
        assert failed.value.failure is Failure.DROPPED


async def test_a_connection_that_has_ended_takes_no_call() -> None:
    async with serving(answer) as channel:
        connection = await channel.connect()
        connection.close()
        with pytest.raises(Broken):
            await asyncio.wait_for(connection.call(b"", (b"x",), 100), 5)
        assert await ask(channel) == MESSAGE


async def test_calls_that_wait_for_one_connection_share_it_though_one_gives_up() -> None:
    connections = 0
    greeting = asyncio.Event()

    async def script(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        await greeting.wait()
        await answer(peer)

    async with serving(script) as channel:
        tasks = [asyncio.create_task(ask(channel)) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        greeting.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert answers[1:] == [MESSAGE] * 4
    assert connections == 1


async def test_a_status_crosses_with_its_words() -> None:
    fields = [*OK, ("grpc-status", "14"), ("grpc-message", "maximum queue size %C3%A9")]

    async def script(peer: Peer) -> None:
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        peer.send(peer.headers(stream, fields, END_STREAM))

    async with serving(script) as channel:
        with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
            await ask(channel)


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


async def test_tls_is_verified_against_the_roots_that_grpc_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["h2"])
    async with serving(answer, context, tls=True) as channel:
        with pytest.raises(EndpointFailed, match="it cannot be trusted"):
            await ask(channel)
    monkeypatch.setenv(upstream.ROOTS_VARIABLE, str(cert))
    async with serving(answer, context, tls=True) as channel:
        assert await ask(channel) == MESSAGE


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("tls", [False, True])
def test_large_frames_are_read_into_their_place_on_every_loop(
    run: Callable[..., None], tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["h2"])
    monkeypatch.setenv(upstream.ROOTS_VARIABLE, str(cert))
    large = random.Random(0).randbytes(3_000_001)

    async def script(peer: Peer) -> None:
        await peer.greet()
        while True:
            _, _, stream, _ = await peer.until(DATA, END_STREAM)
            content = prefixed(large)
            peer.send(peer.headers(stream, OK))
            for at in range(0, len(content), 700_000):
                peer.send(frame(DATA, 0, stream, content[at : at + 700_000]))
            peer.send(peer.headers(stream, TRAILERS, END_STREAM))

    async def calls() -> None:
        async with serving(script, context if tls else None, tls=tls) as channel:
            for got in await asyncio.gather(*(ask(channel) for _ in range(3))):
                assert got == large

    run(calls())


def test_a_block_that_fills_the_table_changes_what_the_next_means() -> None:
    encoder, blocks = hpack.Encoder(), HeaderBlocks(text)
    for round_ in range(3):
        for fields in (OK, TRAILERS, [("grpc-status", str(round_)), ("grpc-message", "x" * 200)]):
            assert blocks.decode(encoder.encode(fields)) == dict(fields)
            assert blocks.decode(encoder.encode(fields)) == dict(fields)
    assert blocks.decode(b"\x88") == {":status": "200"}


@pytest.mark.parametrize(
    ("block", "leaves"),
    [
        (b"", True),
        (b"\x88\xbe", True),
        (b"\x00\x01a\x02bc\x88", True),
        (b"\x0d\x02ab", True),
        (b"\x10\x81a\x82bc", True),
        (b"\x40\x01a\x01b", False),
        (b"\x88\x41\x01b", False),
        (b"\x20", False),
        (b"\xff\x01", True),
        (b"\xff\x81\x01\x20", False),
        (b"\x0f\x0d\x0258", True),  # content-length, as nghttp2 sends it
        (b"\x0f\x0d\x0258\x40\x01a\x01b", False),
        (b"\x00\x7f\x00" + bytes(127) + b"\x00", True),
        (b"\x00\x7f\x00" + bytes(127) + b"\x00\x20", False),
    ],
)
def test_which_blocks_leave_the_table_alone(block: bytes, leaves: bool) -> None:
    assert leaves_table(block) is leaves
