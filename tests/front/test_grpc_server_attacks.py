"""What would hurt the gRPC listener: each ends its connection, with its code, no other.

The bounds are what ends them: without them (the known-bad variants) the same bytes are taken.
"""

from __future__ import annotations

import asyncio
import logging
import random
import struct
from collections.abc import AsyncIterator, Iterator

import h2.config
import h2.connection
import h2.events
import pytest
import structlog
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value

from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.server.grpc import limits, listener
from modelport.gateway.server.grpc.connection import GrpcConnection
from modelport.gateway.server.grpc.listener import GrpcListener
from modelport.gateway.server.grpc.server_state import Shared
from modelport.gateway.server.grpc.service import Service
from modelport.gateway.server.listening import ConnectionLimit
from modelport.gateway.wire import header_blocks
from modelport.gateway.wire.http2 import (
    ACK,
    CANCEL,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_WINDOW_BYTES,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    frame,
    literal,
    reset,
    settings,
    window_update,
)
from tests.front.grpc_peer import (
    MAX_MESSAGE,
    Peer,
    Probe,
    Wire,
    connected,
    head,
    listening,
    prefixed,
    within,
)

ASKED = prefixed(BytesValue(value=b"what was asked").SerializeToString())
CALL = head(1) + frame(DATA, END_STREAM, 1, ASKED)
FUZZ_CASES = 10_000


@pytest.fixture(autouse=True)
def silence(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client sends is worth a line in the log."""
    with structlog.testing.capture_logs() as logs:
        yield
    assert [entry for entry in logs if entry["log_level"] in ("warning", "error")] == []
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.fixture
async def server() -> AsyncIterator[GrpcListener]:
    async with listening() as opened:
        yield opened


#: What ends the connection, and with which code.
BROKEN: dict[str, tuple[bytes, int]] = {
    "no settings first": (frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    "settings on a stream": (frame(SETTINGS, 0, 1), PROTOCOL_ERROR),
    "settings cut off": (frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
    "settings acknowledged with more": (
        settings() + frame(SETTINGS, ACK, 0, bytes(6)),
        FRAME_SIZE_ERROR,
    ),
    "window setting": (settings((INITIAL_WINDOW_SIZE, 2**31)), FLOW_CONTROL_ERROR),
    "frame size setting": (settings((MAX_FRAME_SIZE, 100)), PROTOCOL_ERROR),
    "push setting": (settings((2, 2)), PROTOCOL_ERROR),
    "ping on a stream": (settings() + frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "short ping": (settings() + frame(PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "short reset": (settings() + head(1) + frame(RST_STREAM, 0, 1, b"a"), FRAME_SIZE_ERROR),
    "short priority": (settings() + frame(PRIORITY, 0, 1, b"a"), FRAME_SIZE_ERROR),
    "short window": (settings() + frame(WINDOW_UPDATE, 0, 0, b"a"), FRAME_SIZE_ERROR),
    "reset of an idle stream": (settings() + reset(1, 8), PROTOCOL_ERROR),
    "window of an idle stream": (settings() + window_update(1, 1), PROTOCOL_ERROR),
    "data on an idle stream": (settings() + frame(DATA, 0, 1, b"x"), PROTOCOL_ERROR),
    "data on no stream": (settings() + frame(DATA, 0, 0, b"x"), PROTOCOL_ERROR),
    "data after the end": (settings() + CALL + frame(DATA, 0, 1, b"x"), STREAM_CLOSED),
    "headers after the end": (settings() + CALL + head(1), STREAM_CLOSED),
    "headers after a reset": (settings() + head(1) + reset(1, 8) + head(1), STREAM_CLOSED),
    "headers on no stream": (settings() + head(0), PROTOCOL_ERROR),
    "an even stream": (settings() + head(2), PROTOCOL_ERROR),
    "a push": (settings() + frame(5, 0, 1, bytes(4)), PROTOCOL_ERROR),
    "a window by nothing": (settings() + window_update(0, 0), PROTOCOL_ERROR),
    "a window too large": (settings() + window_update(0, MAX_WINDOW_BYTES), FLOW_CONTROL_ERROR),
    "padding": (settings() + head(1) + frame(DATA, PADDED, 1, b"\xff"), PROTOCOL_ERROR),
    "padding of headers": (settings() + frame(HEADERS, PADDED, 1, b"\xff"), PROTOCOL_ERROR),
    "interrupted": (settings() + head(1, 0) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    "interrupted by data": (settings() + head(1, 0) + frame(DATA, 0, 1), PROTOCOL_ERROR),
    "on another stream": (
        settings() + head(1, 0) + frame(CONTINUATION, END_HEADERS, 3),
        PROTOCOL_ERROR,
    ),
    "out of nothing": (settings() + frame(CONTINUATION, END_HEADERS, 1), PROTOCOL_ERROR),
    "huge frame": (settings() + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01", FRAME_SIZE_ERROR),
    "huge headers": (settings() + b"\xff\xff\xff\x01\x04\x00\x00\x00\x01", ENHANCE_YOUR_CALM),
    "bad index": (settings() + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff"), COMPRESSION_ERROR),
    "bad huffman": (settings() + frame(HEADERS, END_HEADERS, 1, b"\0\x84\xff\xff\xff\xff\0"),
                    COMPRESSION_ERROR),
    "large table": (settings() + frame(HEADERS, END_HEADERS, 1, b"\x3f\xe1\xff\x03"),
                    COMPRESSION_ERROR),
    "too many settings": (settings(*[(INITIAL_WINDOW_SIZE, 1000)] * 33), ENHANCE_YOUR_CALM),
    "too many fields": (settings() + frame(HEADERS, END_HEADERS, 1, b"\x88" * 300),
                        ENHANCE_YOUR_CALM),
    "endless integer": (settings() + frame(HEADERS, END_HEADERS, 1, b"\xff" * 60_000),
                        COMPRESSION_ERROR),
    "header bomb": (
        settings() + frame(HEADERS, END_HEADERS, 1,
                           b"\x40" + literal(b"a", bytes(3000))[1:] + b"\xbe" * 100),
        ENHANCE_YOUR_CALM,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
async def test_who_breaks_the_protocol_is_told_how(case: str, server: GrpcListener) -> None:
    sent, code = BROKEN[case]
    async with connected(server.port) as other, connected(server.port, PREFACE + sent) as peer:
        assert await peer.code() == code
        assert await within(peer.reader.read()) == b""
        await other.serves()


async def test_what_is_no_http_is_told_so(server: GrpcListener) -> None:
    async with connected(server.port, b"\x16\x03\x01 a TLS hello, perhaps") as peer:
        assert await peer.code() == PROTOCOL_ERROR
        assert await within(peer.reader.read()) == b""


# -- floods ---------------------------------------------------------------------------------------


def quick_resets(count: int) -> bytes:
    return b"".join(head(2 * n + 1) + reset(2 * n + 1, 8) for n in range(count))


#: What costs work and brings none, as often as a bound allows and a little more.
FLOODS: dict[str, tuple[bytes, int]] = {
    "pings": (frame(PING, 0, 0, bytes(8)) * 3000, ENHANCE_YOUR_CALM),
    "settings": (settings() * 3000, ENHANCE_YOUR_CALM),
    "windows": (window_update(0, 1) * 3000, ENHANCE_YOUR_CALM),
    "priorities": (frame(PRIORITY, 0, 1, bytes(5)) * 3000, ENHANCE_YOUR_CALM),
    "unknown": (frame(0xEE, 0, 0) * 3000, ENHANCE_YOUR_CALM),
    "empty data": (head(1) + frame(DATA, 0, 1) * 3000, ENHANCE_YOUR_CALM),
    "empty continuations": (head(1, 0) + frame(CONTINUATION, 0, 1) * 3000, ENHANCE_YOUR_CALM),
    "continuations": (head(1, 0) + frame(CONTINUATION, 0, 1, bytes(1000)) * 70, ENHANCE_YOUR_CALM),
    "quick resets": (quick_resets(1100), ENHANCE_YOUR_CALM),
    "made resets": (
        b"".join(head(2 * n + 1) + window_update(2 * n + 1, 0) for n in range(1100)),
        ENHANCE_YOUR_CALM,
    ),
    "calls too many": (b"".join(head(2 * n + 1) for n in range(4000)), ENHANCE_YOUR_CALM),
    "malformed calls": (
        b"".join(head(2 * n + 1, path="") for n in range(3000)),
        ENHANCE_YOUR_CALM,
    ),
}


def windows_of_many(peer: Peer, calls: int) -> None:
    """Each of these settings has every call's window changed."""
    peer.send(*(head(2 * n + 1) for n in range(calls)))
    peer.send(*(settings((INITIAL_WINDOW_SIZE, 1000 + n % 2)) for n in range(40)))


async def test_settings_that_change_many_windows_count_for_more(server: GrpcListener) -> None:
    async with connected(server.port) as peer:
        windows_of_many(peer, 500)
        assert await peer.code() == ENHANCE_YOUR_CALM
    async with connected(server.port) as peer:
        windows_of_many(peer, 5)
        peer._next = 11
        await peer.serves()


@pytest.mark.parametrize("case", FLOODS)
async def test_a_flood_ends_its_connection(case: str, server: GrpcListener) -> None:
    sent, code = FLOODS[case]
    async with connected(server.port) as other, connected(server.port) as peer:
        peer.send(sent)
        assert await peer.code() == code
        await other.serves()


async def test_without_its_bounds_no_flood_is_seen(
    server: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is the bounds that the tests above see at work."""
    for bound in ("MAX_IDLE_FRAMES", "MAX_QUICK_RESETS"):
        monkeypatch.setattr(limits, bound, 10**9)
    async with connected(server.port) as peer:
        peer.send(FLOODS["pings"][0], FLOODS["quick resets"][0])
        peer._next = 2 * 1100 + 1
        await peer.serves()


async def test_many_calls_and_what_belongs_to_them_are_no_flood(server: GrpcListener) -> None:
    async with connected(server.port) as peer:
        for number in range(3000):
            asked = peer.ask(b"%d" % number)
            peer.send(window_update(0, 20), frame(PING, 0, 0, bytes(8)))
            assert (await peer.answer(asked))[1] == {"grpc-status": "0"}


async def test_clients_that_give_up_now_and_then_are_no_flood() -> None:
    async with listening(Probe()) as server, connected(server.port) as peer:
        for _ in range(1500):
            given_up = peer.ask(path="/probe.Probe/Wait")
            peer.send(reset(given_up, 8))
            await peer.serves()


async def test_a_client_that_asks_for_pongs_and_reads_none_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "UNREAD_BYTES", -1)
    async with listening() as server, connected(server.port) as peer:
        peer.send(frame(PING, 0, 0, bytes(8)))
        assert await peer.code() == ENHANCE_YOUR_CALM


#: A method, its request, and a reply of more than ten bytes.
UNREAD = {"Echo": BytesValue(value=bytes(100)), "Count": Int64Value(value=2)}


@pytest.mark.parametrize("method", UNREAD)
async def test_a_reply_that_its_client_never_reads_is_given_up(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UNREAD_SECONDS", 0.1)
    monkeypatch.setattr(listener, "CHECK_SECONDS", 0.02)
    greeting = PREFACE + settings((INITIAL_WINDOW_SIZE, 10))
    async with listening() as server, connected(server.port, greeting) as peer:
        content = prefixed(UNREAD[method].SerializeToString())
        peer.send(head(1, path=f"/probe.Probe/{method}"), frame(DATA, END_STREAM, 1, content))
        assert await peer.code(RST_STREAM) == CANCEL
        assert not server._shared.calls
        peer.send(frame(PING, 0, 0, bytes(8)))
        assert (await peer.until(PING, GOAWAY))[0] == PING  # the connection is as it was


async def test_a_reply_that_its_client_reads_slowly_is_sent_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "UNREAD_SECONDS", 0.3)
    monkeypatch.setattr(listener, "CHECK_SECONDS", 0.02)
    greeting = PREFACE + settings((INITIAL_WINDOW_SIZE, 0))
    async with listening() as server, connected(server.port, greeting) as peer:
        peer.send(head(1), frame(DATA, END_STREAM, 1, ASKED))
        for _ in range(6):
            await asyncio.sleep(0.1)  # the pace of the client, which is what is tested
            peer.send(window_update(1, 1))
        peer.send(window_update(1, 1000))
        assert await peer.answer(1) == (ASKED, {"grpc-status": "0"})


@pytest.mark.parametrize("method", ["Echo", "Slow"])
async def test_bodies_that_never_end_hold_no_more_than_the_budget(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PROCESS, "limit_bytes", 2**20)
    part = b"\0" + (200_000).to_bytes(4) + bytes(100_000)
    async with listening(Probe()) as server, connected(server.port) as other:
        async with connected(server.port) as peer:
            for stream in range(1, 21, 2):
                peer.send(head(stream, path=f"/probe.Probe/{method}"))
                for at in range(0, len(part), 16_000):
                    peer.send(frame(DATA, 0, stream, part[at : at + 16_000]))
            for _ in range(5):  # the others fit into a half of the budget, which is a connection's
                *_, block = await peer.until(HEADERS)
                assert dict(peer.decoder.decode(block))["grpc-status"] == "8"
            assert PROCESS.used_bytes <= 2**19
            await other.serves()
        while PROCESS.used_bytes:
            await asyncio.sleep(0)


async def test_messages_of_a_long_stream_give_back_what_they_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROCESS, "limit_bytes", 2**17)
    content = prefixed(BytesValue(value=bytes(10_000)).SerializeToString())
    async with listening() as server, connected(server.port) as peer:
        peer.send(head(1, path="/probe.Probe/Talk"), window_update(0, 2**30))
        for _ in range(50):
            peer.send(frame(DATA, 0, 1, content), window_update(1, len(content)))
            assert (await peer.until(DATA))[3] == content
        assert PROCESS.used_bytes == 0


def test_what_a_connection_remembers_of_headers_is_bounded() -> None:
    blocks = header_blocks.HeaderBlocks(header_blocks.text)
    for number in range(1000):
        blocks.decode(literal(b"a", b"%d" % number) * 200)
        blocks.decode(literal(b"a", b"%d" % number))
    assert len(blocks._known) == header_blocks.MAX_KNOWN
    assert max(map(len, blocks._known)) <= header_blocks.MAX_KNOWN_BYTES


# -- anything at all ------------------------------------------------------------------------------


SEEDS = (
    settings() + CALL,
    settings((INITIAL_WINDOW_SIZE, 10)) + CALL + window_update(1, 100) + window_update(0, 1),
    settings() + head(1, path="/probe.Probe/Talk") + frame(DATA, 0, 1, ASKED) + reset(1, 8),
    settings() + head(1, path="/probe.Probe/Wait") + frame(DATA, END_STREAM, 1, ASKED) + head(3),
    settings()
    + head(1, 0)[:40]
    + frame(CONTINUATION, END_HEADERS, 1)
    + frame(PING, 0, 0, bytes(8)),
    settings() + head(1) + frame(DATA, PADDED, 1, b"\3" + ASKED + bytes(3)) + frame(GOAWAY, 0, 0),
)


def mutated(rng: random.Random) -> bytes:
    content = bytearray(rng.choice(SEEDS))
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
                content += rng.choice(SEEDS)[6:]
    return bytes(content)


async def test_no_bytes_break_more_than_their_own_connection() -> None:
    """Each is served on, or is told why not; nothing else is raised, or left behind."""
    rng, loop = random.Random(7), asyncio.get_running_loop()
    shared = Shared(Service(Probe().methods(), MAX_MESSAGE), ConnectionLimit(10**6))
    told = served = 0
    before = asyncio.all_tasks()
    for case in range(FUZZ_CASES):
        wire, protocol = Wire(), GrpcConnection(shared, loop)
        protocol.connection_made(wire)
        content = rng.randbytes(rng.randrange(1, 60)) if case % 4 == 0 else mutated(rng)
        whole = PREFACE + content if case % 16 else content
        at = 0
        while at < len(whole):
            size = rng.randrange(1, 80)
            protocol.data_received(whole[at : at + size])
            at += size
            if rng.randrange(8) == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        frames = kinds(bytes(wire.written)) if case % 16 else []
        assert frames.count(GOAWAY) <= 1 + content.count(GOAWAY)
        told += GOAWAY in frames
        served += DATA in frames
        protocol.connection_lost(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not shared.calls
    assert not shared.connections
    assert asyncio.all_tasks() == before
    assert told > FUZZ_CASES // 5
    assert served > FUZZ_CASES // 20


def kinds(written: bytes) -> list[int]:
    """The types of the frames in ``written``, which is frames to its end."""
    found, at = [], 0
    while at < len(written):
        (size,) = struct.unpack(">I", b"\0" + written[at : at + 3])
        found.append(written[at + 3])
        at += 9 + size
    assert at == len(written)
    return found


# -- another's client -----------------------------------------------------------------------------


async def test_a_client_of_another_make_understands_all_that_is_said(server: GrpcListener) -> None:
    """``h2`` checks what it receives more strictly than the protocol is often spoken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    large = prefixed(BytesValue(value=bytes(300_000)).SerializeToString())
    fields = {":method": "POST", ":scheme": "http", ":authority": "a", "te": "trailers"}
    fields |= {"content-type": "application/grpc", "grpc-timeout": "5S"}
    paths = ["/probe.Probe/Echo", "/probe.Probe/Talk", "/probe.Probe/Nothing"]
    left: dict[int, bytes] = {}
    for path in paths * 3:
        stream = client.get_next_available_stream_id()
        client.send_headers(stream, [(":path", path), *fields.items()])
        left[stream] = large if path != paths[2] else b""
    got: dict[int, bytearray] = {stream: bytearray() for stream in left}
    statuses: dict[int, str] = {}
    while len(statuses) < len(left):
        for stream, content in left.items():
            room = min(client.local_flow_control_window(stream), client.max_outbound_frame_size)
            if room and content and stream not in statuses:
                client.send_data(stream, content[:room], end_stream=room >= len(content))
                left[stream] = content[room:]
        writer.write(client.data_to_send())
        for event in client.receive_data(await within(reader.read(2**16))):
            match event:
                case h2.events.DataReceived():
                    got[event.stream_id] += event.data
                    client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                    found = dict(event.headers)
                    if "grpc-status" in found:
                        statuses[event.stream_id] = found["grpc-status"]
                case h2.events.ConnectionTerminated():
                    pytest.fail(f"{event}")
    writer.close()
    assert list(statuses.values()).count("12") == 3
    assert [bytes(got[s]) for s, status in statuses.items() if status == "0"] == [large] * 6
