"""Connections to other servers that end, go away, refuse calls, or break the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable

import pytest

from modelport.gateway.upstream import grpc as upstream
from modelport.gateway.upstream import http2
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire.http2.frames import (
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
)
from tests.gateway.upstream.http2_peer import (
    MESSAGE,
    OK,
    TRAILERS,
    Http2Peer,
    answer,
    ask,
    frame,
    prefixed,
    serving,
)


async def test_a_server_that_goes_away_finishes_what_it_took_and_gets_nothing_new() -> None:
    connections = 0

    async def script(peer: Http2Peer) -> None:
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
        assert failed.value.failure is FailureKind.DROPPED


async def test_no_connection_gets_more_calls_than_it_allows() -> None:
    together = asyncio.Barrier(2)

    async def script(peer: Http2Peer) -> None:
        await peer.greet((MAX_CONCURRENT_STREAMS, 1))
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        await together.wait()
        peer.send(peer.reply(stream))

    async with serving(script) as channel:
        assert await asyncio.gather(ask(channel), ask(channel)) == [MESSAGE, MESSAGE]


async def test_a_server_that_takes_no_calls_is_not_connected_to_again_and_again() -> None:
    connections = 0

    async def script(peer: Http2Peer) -> None:
        nonlocal connections
        connections += 1
        await peer.greet((MAX_CONCURRENT_STREAMS, 0))

    async with serving(script) as channel:
        with pytest.raises(EndpointFailed, match="it allows no streams") as failed:
            await ask(channel)
    assert failed.value.failure is FailureKind.REFUSED
    assert connections == 1


async def test_a_ping_is_answered() -> None:
    ponged = asyncio.Event()

    async def script(peer: Http2Peer) -> None:
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

    async def script(peer: Http2Peer) -> None:
        await peer.greet()
        await peer.until(PING)

    async with serving(script) as channel:
        with pytest.raises(EndpointFailed) as failed:
            await ask(channel)
        assert failed.value.failure is FailureKind.DROPPED


#: What a server sends after its settings and a call, and how that fails.
BROKEN: dict[str, tuple[Callable[[Http2Peer], bytes], FailureKind]] = {
    "reset": (lambda p: frame(RST_STREAM, 0, 1, struct.pack(">I", 2)), FailureKind.DROPPED),
    "pushed": (lambda p: frame(5, 0, 1, bytes(4)), FailureKind.DROPPED),
    "bad headers": (lambda p: frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff"), FailureKind.DROPPED),
    "interrupted": (
        lambda p: frame(HEADERS, 0, 1, b"\x88") + frame(DATA, 0, 1, b"x"),
        FailureKind.DROPPED,
    ),
    "too much padding": (lambda p: frame(DATA, PADDED, 1, b"\xff"), FailureKind.DROPPED),
    "huge frame": (lambda p: b"\xff\xff\xff\x01\x04" + bytes(4), FailureKind.DROPPED),
    "header flood": (lambda p: frame(HEADERS, 0, 1, bytes(16_000)) * 1
                     + frame(CONTINUATION, 0, 1, bytes(16_000)) * 100, FailureKind.DROPPED),
    "short settings": (lambda p: frame(SETTINGS, 0, 0, b"abc"), FailureKind.DROPPED),
    "no grpc": (lambda p: p.headers(1, [(":status", "200")], END_STREAM), FailureKind.DAMAGED),
    "http 404": (lambda p: p.headers(1, [(":status", "404")], END_STREAM), FailureKind.DAMAGED),
    "http 503": (lambda p: p.headers(1, [(":status", "503")], END_STREAM), FailureKind.UNREADY),
    "no message": (
        lambda p: p.headers(1, OK) + p.headers(1, TRAILERS, END_STREAM),
        FailureKind.DAMAGED,
    ),
    "compressed": (
        lambda p: p.headers(1, OK) + frame(DATA, 0, 1, b"\1\0\0\0\1x")
        + p.headers(1, TRAILERS, END_STREAM),
        FailureKind.DAMAGED,
    ),
    "two messages": (
        lambda p: p.headers(1, OK) + frame(DATA, 0, 1, prefixed(b"a") * 2)
        + p.headers(1, TRAILERS, END_STREAM),
        FailureKind.DAMAGED,
    ),
    "not serving": (
        lambda p: p.headers(1, [*OK, ("grpc-status", "14")], END_STREAM),
        FailureKind.UNREADY,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
async def test_a_server_that_breaks_the_protocol_fails_the_call_at_once(case: str) -> None:
    make, failure = BROKEN[case]

    async def script(peer: Http2Peer) -> None:
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
    async def script(peer: Http2Peer) -> None:
        await peer.reader.readexactly(len(PREFACE))
        peer.send(greeting)
        peer.writer.close()

    async with serving(script) as channel:
        with pytest.raises(EndpointFailed, match="it does not speak gRPC") as failed:
            await ask(channel)
    assert failed.value.failure is FailureKind.REFUSED


async def test_a_connection_that_ends_as_it_begins_fails_the_call_at_once() -> None:
    async def script(peer: Http2Peer) -> None:
        await peer.greet()
        peer.writer.close()

    async with serving(script) as channel:
        with pytest.raises(EndpointFailed) as failed:
            await ask(channel)
        assert failed.value.failure is FailureKind.DROPPED


async def test_a_connection_that_has_ended_takes_no_call() -> None:
    async with serving(answer) as channel:
        connection = await channel.connect()
        connection.close()
        with pytest.raises(EndpointFailed):
            await asyncio.wait_for(connection.call(b"", (b"x",), 100), 60)
        assert await ask(channel) == MESSAGE


# -- servers that are silent ----------------------------------------------------------------------


async def test_a_server_that_accepts_and_never_greets_has_failed_for_everybody() -> None:
    async def script(peer: Http2Peer) -> None:
        await peer.reader.read()

    async with serving(script) as channel:
        channel._connect_seconds = 0.05
        asked = await asyncio.gather(*(ask(channel) for _ in range(8)), return_exceptions=True)
        failures = [each.failure for each in asked if isinstance(each, EndpointFailed)]
        assert failures == [FailureKind.SILENT] * 8, asked


async def test_cancelling_one_wait_for_a_connection_does_not_end_the_others() -> None:
    async def script(peer: Http2Peer) -> None:
        await peer.reader.read()

    async with serving(script) as channel:
        channel._connect_seconds = 0.2
        asked = [asyncio.ensure_future(ask(channel)) for _ in range(2)]
        await asyncio.sleep(0)
        asked[0].cancel()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert isinstance(results[1], EndpointFailed)


async def test_a_reset_ends_the_wait_for_a_connection_and_opens_another() -> None:
    connections = 0

    async def script(peer: Http2Peer) -> None:
        nonlocal connections
        connections += 1
        if connections == 1:
            await peer.reader.read()
        else:
            await answer(peer)

    async with serving(script) as channel:
        first = asyncio.ensure_future(ask(channel))
        while not connections:
            await asyncio.sleep(0.001)
        channel.reset()
        with pytest.raises(EndpointFailed) as failed:
            await first
        assert failed.value.failure is FailureKind.SILENT
        assert await ask(channel) == MESSAGE


async def test_a_reset_lets_calls_in_flight_end_and_sends_the_next_over_a_new_connection() -> None:
    connections, go_on = 0, asyncio.Event()

    async def script(peer: Http2Peer) -> None:
        nonlocal connections
        connections += 1
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        if connections == 1:
            await go_on.wait()
        peer.send(peer.reply(stream))

    async with serving(script) as channel:
        first = asyncio.ensure_future(ask(channel))
        while channel.open() is None or not channel.open().busy:  # type: ignore[union-attr]
            await asyncio.sleep(0.001)
        channel.reset()
        assert await ask(channel) == MESSAGE
        go_on.set()
        assert await first == MESSAGE
        assert connections == 2


@pytest.mark.parametrize(
    ("frozen", "between"),
    [
        (True, b""),
        (False, b""),
        (False, frame(PING, 0, 0, bytes(8))),
        (False, frame(SETTINGS, 0, 0)),
    ],
    ids=["frozen", "silent", "pings", "settings"],
)
async def test_a_silent_server_is_pinged_once_and_dropped_if_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, frozen: bool, between: bytes
) -> None:
    for module in (upstream, http2):
        monkeypatch.setattr(module, "SILENCE_SECONDS", 0.02)
        monkeypatch.setattr(module, "PONG_SECONDS", 0.05)
    pings = 0

    async def script(peer: Http2Peer) -> None:
        nonlocal pings
        await peer.greet()
        _, _, stream, _ = await peer.until(DATA, END_STREAM)
        _, _, _, content = await peer.until(PING)
        pings += 1
        if frozen:
            return
        peer.send(frame(PING, ACK, 0, content) + between)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                while True:
                    kind, flags, _, _ = await peer.read()
                    pings += kind == PING and not flags & ACK
        peer.send(peer.reply(stream))

    async with serving(script) as channel:
        if frozen:
            with pytest.raises(EndpointFailed) as failed:
                await ask(channel)
            assert failed.value.failure is FailureKind.DROPPED
        else:
            assert await ask(channel) == MESSAGE
    assert pings == 1, "gRPC servers end a connection on which pings come often"


@pytest.mark.parametrize(
    "setting", [(5, 0), (5, 2**14 - 1), (5, 2**24), (5, 2**25), (4, 2**31), (4, 2**32 - 1)]
)
async def test_settings_that_http2_forbids_are_refused(setting: tuple[int, int]) -> None:
    async def script(peer: Http2Peer) -> None:
        await peer.greet(setting)

    async with serving(script) as channel:
        with pytest.raises(EndpointFailed) as failed:
            await ask(channel)
        assert failed.value.failure is FailureKind.REFUSED
