"""Attacks on the gRPC listener, besides those on HTTP/2 in general.

For those see ``test_http2_attacks.py``.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import random
from collections.abc import AsyncIterator, Iterator

import h2.config
import h2.connection
import h2.events
import pytest
import structlog
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value

from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.server import time_limits
from modelport.gateway.server.grpc.connection import GrpcConnection, GrpcListener
from modelport.gateway.server.grpc.service import STREAM_BYTES, Service
from modelport.gateway.server.listener import ServerState
from modelport.gateway.server.listening_socket import ConnectionLimit
from modelport.gateway.wire.http2 import abuse_limits, header_blocks
from modelport.gateway.wire.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    ErrorCode,
    frame,
    literal,
    reset,
    settings,
    window_update,
)
from tests.gateway.server.grpc_peer import (
    MAX_MESSAGE,
    GrpcPeer,
    MethodProbe,
    Wire,
    connected,
    head,
    listening,
    prefixed,
    within,
)
from tests.gateway.server.http2_roles import kinds, mutated

ASKED = prefixed(BytesValue(value=b"what was asked").SerializeToString())
CALL = head(1) + frame(DATA, END_STREAM, 1, ASKED)
FUZZ_CASES = 3_000


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


async def test_bytes_that_are_not_http_are_a_protocol_error(server: GrpcListener) -> None:
    async with connected(server.port, b"\x16\x03\x01 a TLS hello, perhaps") as peer:
        assert await peer.code() == ErrorCode.PROTOCOL_ERROR
        assert await within(peer.reader.read()) == b""


# -- floods ---------------------------------------------------------------------------------------


def windows_of_many(peer: GrpcPeer, calls: int) -> None:
    """Each of these settings has every call's window changed."""
    peer.send(*(head(2 * n + 1) for n in range(calls)))
    peer.send(*(settings((INITIAL_WINDOW_SIZE, 1000 + n % 2)) for n in range(40)))


async def test_settings_that_change_many_windows_count_for_more(server: GrpcListener) -> None:
    async with connected(server.port) as peer:
        windows_of_many(peer, 500)
        assert await peer.code() == ErrorCode.ENHANCE_YOUR_CALM
    async with connected(server.port) as peer:
        windows_of_many(peer, 5)
        peer._next = 11
        await peer.serves()


async def test_many_calls_and_what_belongs_to_them_are_no_flood(server: GrpcListener) -> None:
    async with connected(server.port) as peer:
        for number in range(3000):
            asked = peer.ask(b"%d" % number)
            peer.send(window_update(0, 20), frame(PING, 0, 0, bytes(8)))
            assert (await peer.answer(asked))[1] == {"grpc-status": "0"}


async def test_clients_that_give_up_now_and_then_are_no_flood() -> None:
    async with listening(MethodProbe()) as server, connected(server.port) as peer:
        for _ in range(1500):
            given_up = peer.ask(path="/probe.Probe/Wait")
            peer.send(reset(given_up, 8))
            await peer.serves()


async def test_a_client_that_asks_for_pongs_and_reads_none_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(abuse_limits, "UNREAD_BYTES", -1)
    async with listening() as server, connected(server.port) as peer:
        peer.send(frame(PING, 0, 0, bytes(8)))
        assert await peer.code() == ErrorCode.ENHANCE_YOUR_CALM


#: A method, its request, and a reply of more than ten bytes.
UNREAD = {"Echo": BytesValue(value=bytes(100)), "Count": Int64Value(value=2)}


@pytest.mark.parametrize("method", UNREAD)
async def test_a_reply_that_its_client_never_reads_is_given_up(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limits, "UNREAD_SECONDS", 0.1)
    monkeypatch.setattr(time_limits, "CHECK_SECONDS", 0.02)
    greeting = PREFACE + settings((INITIAL_WINDOW_SIZE, 10))
    async with listening() as server, connected(server.port, greeting) as peer:
        content = prefixed(UNREAD[method].SerializeToString())
        peer.send(head(1, path=f"/probe.Probe/{method}"), frame(DATA, END_STREAM, 1, content))
        assert await peer.code(RST_STREAM) == ErrorCode.CANCEL
        assert not server.state.requests
        peer.send(frame(PING, 0, 0, bytes(8)))
        assert (await peer.until(PING, GOAWAY))[0] == PING  # the connection is as it was


async def test_a_reply_that_its_client_reads_slowly_is_sent_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits, "UNREAD_SECONDS", 0.3)
    monkeypatch.setattr(time_limits, "CHECK_SECONDS", 0.02)
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
    async with listening(MethodProbe()) as server, connected(server.port) as other:
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


@pytest.mark.parametrize("size", [10_000, 40_000])
@pytest.mark.parametrize("coding", ["identity", "gzip"])
async def test_messages_of_a_long_stream_give_back_what_they_held(
    coding: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressed or not, decoded in place or in a thread."""
    monkeypatch.setattr(PROCESS, "limit_bytes", 2**18)
    message = BytesValue(value=bytes(size)).SerializeToString()
    content = prefixed(message)
    if coding == "gzip":
        packed = gzip.compress(message)
        content = b"\1" + len(packed).to_bytes(4) + packed
    async with listening() as server, connected(server.port) as peer:
        start = head(1, path="/probe.Probe/Talk", grpc_encoding=coding)
        peer.send(start, window_update(0, 2**30))
        for _ in range(50):
            peer.send(window_update(1, size + 100), *pieces(content))
            answer = b""
            while len(answer) < len(prefixed(message)):
                answer += (await peer.until(DATA))[3]
            assert answer == prefixed(message)
        assert PROCESS.used_bytes == STREAM_BYTES  # of the stream, which is still open


def pieces(content: bytes) -> list[bytes]:
    return [frame(DATA, 0, 1, content[at : at + 16_000]) for at in range(0, len(content), 16_000)]


def test_what_a_connection_remembers_of_headers_is_bounded() -> None:
    blocks = header_blocks.HeaderBlocks(lambda section: section)
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


async def test_no_bytes_break_more_than_their_own_connection() -> None:
    """Each is served on, or is told why not; nothing else is raised, or left behind."""
    rng, loop = random.Random(7), asyncio.get_running_loop()
    service = Service(MethodProbe().methods(), MAX_MESSAGE)
    state = ServerState(ConnectionLimit(10**6))
    told = served = 0
    before = asyncio.all_tasks()
    for case in range(FUZZ_CASES):
        wire, protocol = Wire(), GrpcConnection(state, service, loop)
        protocol.connection_made(wire)
        content = rng.randbytes(rng.randrange(1, 60)) if case % 4 == 0 else mutated(rng, SEEDS)
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
    assert not state.requests
    assert not state.connections
    assert asyncio.all_tasks() == before
    assert told > FUZZ_CASES // 5
    assert served > FUZZ_CASES // 20


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
