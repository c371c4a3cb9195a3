"""Attacks of a hostile HTTP/2 peer: each ends its connection with the right error code.

Server and client connections receive the same frames. Limits end floods: without them (the
known-bad variant) the same bytes are accepted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from modelport.gateway.wire.http2 import abuse_limits
from modelport.gateway.wire.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_WINDOW_BYTES,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    frame,
    literal,
    reset,
    settings,
    window_update,
)
from tests.gateway.server.http2_roles import ASKED, ROLES, Role, Rows, facing, mutated

Sent = Callable[[Role], bytes]
P, F, S = ErrorCode.PROTOCOL_ERROR, ErrorCode.FLOW_CONTROL_ERROR, ErrorCode.FRAME_SIZE_ERROR
C, X, CALM = ErrorCode.COMPRESSION_ERROR, ErrorCode.STREAM_CLOSED, ErrorCode.ENHANCE_YOUR_CALM
FUZZ_CASES = 800
A_LONG_FIELD = literal(b"a", bytes(3000))


def fields(content: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS, 1, content)


#: What the peer sends in place of its settings, and the code of our GOAWAY.
GREETINGS: dict[str, tuple[bytes, ErrorCode]] = {
    "no settings first": (frame(PING, 0, 0, bytes(8)), P),
    "data first": (frame(DATA, 0, 1, b"x"), P),
    "an acknowledgement first": (frame(SETTINGS, ACK, 0), P),
    "settings on a stream": (frame(SETTINGS, 0, 1), P),
    "settings cut off": (frame(SETTINGS, 0, 0, bytes(5)), S),
    "window setting": (settings((INITIAL_WINDOW_SIZE, 2**31)), F),
    "small frame setting": (settings((MAX_FRAME_SIZE, 100)), P),
    "large frame setting": (settings((MAX_FRAME_SIZE, 2**24)), P),
    "push setting": (settings((2, 2)), P),
    "too many settings": (settings(*[(INITIAL_WINDOW_SIZE, 1000)] * 33), CALM),
}
#: What follows its settings. As a client we have opened stream 1.
BROKEN: dict[str, tuple[Sent, ErrorCode]] = {
    "settings acknowledged with more": (lambda p: frame(SETTINGS, ACK, 0, bytes(6)), S),
    "ping on a stream": (lambda p: frame(PING, 0, 1, bytes(8)), P),
    "short ping": (lambda p: frame(PING, 0, 0, bytes(7)), S),
    "short reset": (lambda p: p.head(1) + frame(RST_STREAM, 0, 1, b"a"), S),
    "short priority": (lambda p: frame(PRIORITY, 0, 1, b"a"), S),
    "short window": (lambda p: frame(WINDOW_UPDATE, 0, 0, b"a"), S),
    "short goaway": (lambda p: frame(GOAWAY, 0, 0, bytes(7)), S),
    "goaway on a stream": (lambda p: frame(GOAWAY, 0, 1, bytes(8)), P),
    "reset of an idle stream": (lambda p: reset(9, 8), P),
    "reset of no stream": (lambda p: reset(0, 8), P),
    "window of an idle stream": (lambda p: window_update(9, 1), P),
    "data on an idle stream": (lambda p: frame(DATA, 0, 9, b"x"), P),
    "data on a pushed stream": (lambda p: frame(DATA, 0, 2, b"x"), P),
    "data on no stream": (lambda p: frame(DATA, 0, 0, b"x"), P),
    "data after the end": (lambda p: p.message(1) + frame(DATA, 0, 1, b"x"), X),
    "headers after the end": (lambda p: p.message(1) + p.head(1), X),
    "headers after a reset": (lambda p: p.head(1) + reset(1, 8) + p.head(1), X),
    "data after a reset": (lambda p: p.head(1) + reset(1, 8) + frame(DATA, 0, 1, b"x"), X),
    "headers on no stream": (lambda p: p.head(0), P),
    "an even stream": (lambda p: p.head(2), P),
    "a push": (lambda p: frame(PUSH_PROMISE, 0, 1, bytes(4)), P),
    "a window by nothing": (lambda p: window_update(0, 0), P),
    "a window too large": (lambda p: window_update(0, MAX_WINDOW_BYTES), F),
    "a window setting too large": (
        lambda p: p.head(1) + window_update(1, 2**30) + settings((INITIAL_WINDOW_SIZE, 2**31 - 1)),
        F,
    ),
    "padding": (lambda p: p.head(1) + frame(DATA, PADDED, 1, b"\xff"), P),
    "padding of headers": (lambda p: frame(HEADERS, PADDED, 1, b"\xff"), P),
    "interrupted": (lambda p: p.head(1, 0) + frame(PING, 0, 0, bytes(8)), P),
    "interrupted by data": (lambda p: p.head(1, 0) + frame(DATA, 0, 1), P),
    "on another stream": (lambda p: p.head(1, 0) + frame(CONTINUATION, END_HEADERS, 3), P),
    "out of nothing": (lambda p: frame(CONTINUATION, END_HEADERS, 1), P),
    "huge frame": (lambda p: b"\xff\xff\xff\x00\x00\x00\x00\x00\x01", S),
    "huge headers": (lambda p: b"\xff\xff\xff\x01\x04\x00\x00\x00\x01", CALM),
    "huge extension": (lambda p: b"\xff\xff\xff\xee\x04\x00\x00\x00\x01", S),
    "bad index": (lambda p: fields(b"\xff\xff\xff"), C),
    "bad huffman": (lambda p: fields(b"\0\x84\xff\xff\xff\xff\0"), C),
    "large table": (lambda p: fields(b"\x3f\xe1\xff\x03"), C),
    "too many fields": (lambda p: fields(b"\x88" * 300), CALM),
    "endless integer": (lambda p: fields(b"\xff" * 60_000), C),
    "header bomb": (
        lambda p: fields(b"\x40" + literal(b"a", bytes(3000))[1:] + b"\xbe" * 100),
        CALM,
    ),
}


async def settled() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("case", GREETINGS)
async def test_a_greeting_that_breaks_the_protocol_ends_the_connection(
    case: str, role: str
) -> None:
    sent, code = GREETINGS[case]
    async with facing(role) as peer:
        peer.send(sent)
        await settled()
        assert peer.go_away() == code
        assert peer.wire.ended


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("case", BROKEN)
async def test_a_peer_that_breaks_the_protocol_gets_a_goaway(case: str, role: str) -> None:
    make, code = BROKEN[case]
    async with facing(role) as peer:
        peer.send(settings(), make(peer))
        await settled()
        assert peer.go_away() == code
        assert peer.wire.ended


@pytest.mark.parametrize("role", ROLES)
async def test_frames_in_one_piece_and_byte_by_byte_end_the_same(role: str) -> None:
    for make, code in BROKEN.values():
        async with facing(role) as peer:
            content = settings() + make(peer)
            if len(content) > 5000:
                continue
            for byte in content:
                peer.send(bytes((byte,)))
            await settled()
            assert peer.go_away() == code


# -- streams --------------------------------------------------------------------------------------


def section(change: Callable[[Rows], Rows]) -> Sent:
    """A header section, changed, with the end of the stream."""
    return lambda p: p.head(1, END_HEADERS | END_STREAM, change(list(p.rows)))


#: What resets its stream; the connection goes on.
MALFORMED: dict[str, tuple[Sent, ErrorCode]] = {
    "no pseudo fields": (section(lambda rows: [r for r in rows if r[0][0] != ":"]), P),
    "the first twice": (section(lambda rows: [rows[0], *rows]), P),
    "a pseudo field behind": (section(lambda rows: [*rows[1:], ("x-regular", "1"), rows[0]]), P),
    "an unknown pseudo field": (section(lambda rows: [(":protocol", "x"), *rows]), P),
    "fields of the other role": (
        section(lambda rows: [(":status", "200"), (":path", "/"), *rows[1:]]),
        P,
    ),
    "upper case": (section(lambda rows: [*rows, ("X-Upper", "1")]), P),
    "a line break": (section(lambda rows: [*rows, ("x-bad", "a\nb")]), P),
    "a zero byte": (section(lambda rows: [*rows, ("x-bad", "a\0b")]), P),
    "connection": (section(lambda rows: [*rows, ("connection", "close")]), P),
    "transfer-encoding": (section(lambda rows: [*rows, ("transfer-encoding", "chunked")]), P),
    "a length that is none": (section(lambda rows: [*rows, ("content-length", "-1")]), P),
    "two lengths": (section(lambda r: [*r, ("content-length", "1"), ("content-length", "2")]), P),
    "content-length": (
        lambda p: (
            p.head(1, rows=[*p.rows, ("content-length", "7")]) + frame(DATA, END_STREAM, 1, ASKED)
        ),
        P,
    ),
    "headers within": (lambda p: p.head(1) + p.head(1), P),
    "pseudo trailers": (lambda p: p.head(1) + p.head(1, END_HEADERS | END_STREAM), P),
    "window by nothing": (lambda p: p.head(1) + window_update(1, 0), P),
    "window too large": (lambda p: p.head(1) + window_update(1, MAX_WINDOW_BYTES), F),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("case", MALFORMED)
async def test_a_malformed_stream_is_reset_and_the_connection_stays_open(
    case: str, role: str
) -> None:
    make, code = MALFORMED[case]
    async with facing(role) as peer:
        peer.send(settings(), make(peer))
        await settled()
        assert peer.resets() == {1: code}
        assert await peer.serves(3)
        assert peer.go_away() is None


@pytest.mark.parametrize("role", ROLES)
async def test_data_beyond_a_streams_window_resets_it(role: str) -> None:
    async with facing(role) as peer:
        peer.send(settings(), peer.head(1))
        peer.connection.streams[1].receive_window = 10
        peer.send(frame(DATA, 0, 1, bytes(11)))
        await settled()
        assert peer.resets() == {1: F}
        assert await peer.serves(3)


@pytest.mark.parametrize("role", ROLES)
async def test_data_beyond_the_connections_window_ends_it(role: str) -> None:
    async with facing(role) as peer:
        peer.send(settings(), peer.head(1))
        peer.connection.receive_window = 10
        peer.send(frame(DATA, 0, 1, bytes(11)))
        await settled()
        assert peer.go_away() == F


@pytest.mark.parametrize("role", ROLES)
async def test_frames_in_flight_when_a_stream_was_reset_are_no_error(role: str) -> None:
    async with facing(role) as peer:
        peer.send(settings(), peer.head(1), window_update(1, 0))
        peer.send(frame(DATA, 0, 1, ASKED), frame(DATA, END_STREAM, 1), reset(1, 8))
        assert await peer.serves(3)
        assert peer.go_away() is None


# -- floods ---------------------------------------------------------------------------------------

STREAMS = 1100


def each(make: Callable[[Role, int], bytes]) -> Sent:
    return lambda p: b"".join(make(p, 2 * n + 1) for n in range(STREAMS))


#: What costs work and brings none, as often as a limit allows and a little more.
FLOODS: dict[str, Sent] = {
    "pings": lambda p: frame(PING, 0, 0, bytes(8)) * 3000,
    "pongs": lambda p: frame(PING, ACK, 0, bytes(8)) * 3000,
    "settings": lambda p: settings() * 3000,
    "settings acknowledged": lambda p: frame(SETTINGS, ACK, 0) * 3000,
    "windows": lambda p: window_update(0, 1) * 3000,
    "windows of a closed stream": lambda p: p.message(1) + window_update(1, 1) * 3000,
    "priorities": lambda p: frame(PRIORITY, 0, 1, bytes(5)) * 3000,
    "unknown": lambda p: frame(0xEE, 0, 0) * 3000,
    "resets of a closed stream": lambda p: p.message(1) + reset(1, 8) * 3000,
    "empty data": lambda p: p.head(1) + frame(DATA, 0, 1) * 3000,
    "padding": lambda p: p.head(1) + frame(DATA, PADDED, 1, b"\7" + bytes(7)) * 3000,
    "headers of a stream that was reset": lambda p: p.head(1) + p.head(1) * 3000,
    "empty continuations": lambda p: p.head(1, 0) + frame(CONTINUATION, 0, 1) * 3000,
    "continuations": lambda p: p.head(1, 0) + frame(CONTINUATION, 0, 1, bytes(1000)) * 70,
    "quick resets": each(
        lambda p, n: reset(n, 8) if p.connection.last_stream >= n else p.head(n) + reset(n, 8)
    ),
    "resets that are provoked": each(
        lambda p, n: (b"" if p.connection.last_stream >= n else p.head(n)) + window_update(n, 0)
    ),
}
#: Of the server only, and of the client only.
REQUEST_FLOODS: dict[str, Sent] = {
    "calls too many": lambda p: b"".join(p.head(2 * n + 1) for n in range(4000)),
    "malformed calls": lambda p: b"".join(p.head(2 * n + 1, rows=p.rows[1:]) for n in range(3000)),
}
RESPONSE_FLOODS: dict[str, Sent] = {
    "informational": lambda p: p.head(1, rows=[(":status", "103")]) * 3000,
}


@pytest.mark.parametrize(
    ("role", "case"),
    [
        *((role, case) for role in ROLES for case in FLOODS),
        *((role, case) for role in ("gRPC server", "HTTP server") for case in REQUEST_FLOODS),
        *(("client", case) for case in RESPONSE_FLOODS),
    ],
)
async def test_a_flood_ends_its_connection(
    role: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abuse_limits, "QUICK_RESET_SECONDS", 60.0)  # however busy the machine is
    floods = FLOODS | REQUEST_FLOODS | RESPONSE_FLOODS
    async with facing(role, STREAMS) as peer:
        peer.send(settings(), floods[case](peer))
        await settled()
        assert peer.go_away() == CALM


@pytest.mark.parametrize("role", ROLES)
async def test_without_its_limits_no_flood_is_seen(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("MAX_IDLE_FRAMES", "MAX_QUICK_RESETS"):
        monkeypatch.setattr(abuse_limits, limit, 10**9)
    async with facing(role, STREAMS) as peer:
        peer.send(settings(), FLOODS["pings"](peer), FLOODS["quick resets"](peer))
        assert await peer.serves(2 * STREAMS + 1)
        assert peer.go_away() is None


@pytest.mark.parametrize("role", ROLES)
async def test_settings_that_change_many_windows_count_for_more(role: str) -> None:
    changes = [settings((INITIAL_WINDOW_SIZE, 1000 + n % 2)) for n in range(40)]
    for streams, code in ((500, CALM), (5, None)):
        async with facing(role, streams) as peer:
            peer.send(settings(), *(peer.head(2 * n + 1) for n in range(streams)), *changes)
            assert peer.go_away() == code


@pytest.mark.parametrize("role", ROLES)
async def test_a_peer_that_asks_for_pongs_and_reads_none_is_ended(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abuse_limits, "UNREAD_BYTES", -1)
    async with facing(role) as peer:
        peer.send(settings())
        await settled()
        assert peer.go_away() == CALM


@pytest.mark.parametrize("role", ROLES)
async def test_a_peer_that_stalls_within_a_frame_is_disconnected(role: str) -> None:
    async with facing(role) as peer:
        peer.send(settings(), peer.head(1)[:12])
        now = peer.loop.time()
        peer.connection.check(now)
        assert peer.go_away() is None
        peer.connection.check(now + 60)
        assert peer.go_away() == P


# -- anything at all ------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
async def test_no_bytes_do_more_than_end_their_connection(role: str) -> None:
    rng, ended = random.Random(7), 0
    makers = [make for make, _ in (*BROKEN.values(), *MALFORMED.values())]
    async with facing(role) as peer:
        seeds = [settings() + make(peer)[:300] for make in makers]
        seeds += [settings() + peer.message(1), settings() + peer.head(1)]
    for _ in range(FUZZ_CASES):
        async with facing(role) as peer:
            content = mutated(rng, seeds)
            for at in range(0, len(content), 60):
                peer.send(content[at : at + 60])
            await settled()
            ended += peer.go_away() is not None
    assert FUZZ_CASES // 5 < ended < FUZZ_CASES
