"""The HTTP/2 client of other servers: what a call sends, and what it reads."""

from __future__ import annotations

import asyncio
import random
import ssl
import struct
from collections.abc import Callable
from pathlib import Path

import hpack
import pytest
import uvloop

from modelport.gateway.errors import Unavailable
from modelport.gateway.upstream import grpc as upstream
from modelport.gateway.upstream.outlier_detection import EndpointFailed
from modelport.gateway.wire.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    RST_STREAM,
    WINDOW_UPDATE,
    ErrorCode,
)
from tests.gateway.upstream.http2_peer import (
    MESSAGE,
    OK,
    TRAILERS,
    Frame,
    Http2Peer,
    answer,
    ask,
    certificate,
    frame,
    prefixed,
    serving,
)


async def test_a_call_is_one_grpc_message_each_way_with_its_deadline() -> None:
    seen: list[Frame] = []

    async def script(peer: Http2Peer) -> None:
        peer.seen = seen
        await answer(peer)

    async with serving(script) as channel:
        for _ in range(3):
            assert await ask(channel) == MESSAGE
    headers = dict(hpack.Decoder().decode(next(f[3] for f in seen if f[0] == HEADERS)))
    assert headers[":path"] == "/a.B/C"
    assert headers["te"] == "trailers"
    assert 50_000_000 < int(headers["grpc-timeout"].removesuffix("u")) <= 60_000_000
    assert b"".join(f[3] for f in seen if f[0] == DATA) == prefixed(MESSAGE) * 3


async def test_a_reply_that_comes_byte_by_byte_is_the_same() -> None:
    async def script(peer: Http2Peer) -> None:
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        for byte in peer.reply(stream):
            peer.send(bytes((byte,)))
            await peer.writer.drain()
            await asyncio.sleep(0)

    async with serving(script) as channel:
        assert await ask(channel) == MESSAGE


async def test_padding_continuation_and_what_is_not_known_are_taken() -> None:
    async def script(peer: Http2Peer) -> None:
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


async def test_a_request_waits_for_flow_control_windows_and_resumes() -> None:
    large = bytes(range(256)) * 1000

    async def script(peer: Http2Peer) -> None:
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

    async def script(peer: Http2Peer) -> None:
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        peer.send(peer.reply(stream, large))

    async with serving(script) as channel:
        assert await ask(channel) == large


async def test_a_reply_above_the_limit_is_refused_and_its_stream_reset() -> None:
    reset: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

    async def script(peer: Http2Peer) -> None:
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        peer.send(peer.headers(stream, OK) + frame(DATA, 0, stream, prefixed(bytes(2000))))
        reset.set_result(await peer.until(RST_STREAM))

    async with serving(script, max_reply_bytes=1000) as channel:
        with pytest.raises(EndpointFailed, match="larger than the route's max_reply_bytes"):
            await ask(channel)
        assert (await asyncio.wait_for(reset, 60))[3] == struct.pack(">I", ErrorCode.CANCEL)


async def test_a_cancelled_call_is_reset_and_the_next_goes_on_beside_it() -> None:
    asked, reset = asyncio.Event(), asyncio.Event()

    async def script(peer: Http2Peer) -> None:
        await peer.greet()
        await peer.until(DATA, END_STREAM)
        asked.set()
        await peer.until(RST_STREAM)
        reset.set()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        peer.send(peer.reply(stream - 2, b"too late") + peer.reply(stream))

    async with serving(script) as channel:
        given_up = asyncio.create_task(ask(channel))
        await asyncio.wait_for(asked.wait(), 60)
        given_up.cancel()
        await asyncio.wait_for(reset.wait(), 60)
        assert await ask(channel) == MESSAGE
        with pytest.raises(asyncio.CancelledError):
            await given_up


async def test_calls_that_wait_for_one_connection_share_it_though_one_gives_up() -> None:
    connections = 0
    greeting = asyncio.Event()

    async def script(peer: Http2Peer) -> None:
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

    async def script(peer: Http2Peer) -> None:
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        peer.send(peer.headers(stream, fields, END_STREAM))

    async with serving(script) as channel:
        with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
            await ask(channel)


async def test_tls_is_verified_against_the_roots_configured_for_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["h2"])
    async with serving(answer, context, tls=True) as channel:
        with pytest.raises(EndpointFailed, match="the TLS handshake failed"):
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

    async def script(peer: Http2Peer) -> None:
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
