"""The gRPC listener: one connection, frame by frame, against small methods."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value

from modelport.gateway.server import listening_socket, time_limits
from modelport.gateway.server.grpc import stream
from modelport.gateway.server.grpc.connection import GrpcConnection
from modelport.gateway.server.grpc.service import Service
from modelport.gateway.server.listener import ServerState
from modelport.gateway.server.listening_socket import ConnectionLimit
from modelport.gateway.types import Deadline
from modelport.gateway.wire.http2 import connection as core
from modelport.gateway.wire.http2 import settings as http2_settings
from modelport.gateway.wire.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_STREAM,
    MAX_WINDOW_BYTES,
    PADDED,
    PING,
    PREFACE,
    PRIORITISED,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    frame,
    reset,
    settings,
    window_update,
)
from tests.gateway.server.grpc_peer import (
    REQUEST,
    MethodProbe,
    Wire,
    block,
    connected,
    head,
    listening,
    prefixed,
    within,
)

pytestmark = pytest.mark.usefixtures("transport")
#: The client of the test decides: it is not asyncio's, or TLS has no word for what it does.
CLEAR_TEXT = pytest.mark.parametrize("transport", ["clear text"], indirect=True)

MESSAGE = BytesValue(value=b"what was asked").SerializeToString()
ASKED = prefixed(MESSAGE)


# -- calls ----------------------------------------------------------------------------------------


async def test_a_call_is_answered_with_head_message_and_trailers() -> None:
    async with listening() as server, connected(server.port) as peer:
        peer.send(head(1), frame(DATA, END_STREAM, 1, ASKED))
        kind, flags, _, payload = await peer.until(HEADERS)
        assert (kind, flags) == (HEADERS, END_HEADERS)
        fields = dict(peer.decoder.decode(payload))
        assert fields == {":status": "200", "content-type": "application/grpc"}
        assert await peer.read() == (DATA, 0, 1, ASKED)
        _, flags, _, payload = await peer.read()
        assert flags == END_HEADERS | END_STREAM
        assert dict(peer.decoder.decode(payload)) == {"grpc-status": "0"}


async def test_a_request_that_comes_byte_by_byte_is_the_same() -> None:
    async with listening() as server, connected(server.port, b"") as peer:
        whole = PREFACE + settings() + head(1) + frame(DATA, END_STREAM, 1, ASKED)
        for byte in whole:
            peer.send(bytes((byte,)))
            await peer.writer.drain()
            await asyncio.sleep(0)
        assert await peer.answer(1) == (ASKED, {"grpc-status": "0"})


async def test_padding_priority_continuation_trailers_and_extensions_are_taken() -> None:
    async with listening() as server, connected(server.port) as peer:
        fields = block(REQUEST)
        padded = bytes((3,)) + struct.pack(">IB", 0, 7) + fields[:10] + bytes(3)
        peer.send(
            frame(PRIORITY, 0, 1, struct.pack(">IB", 0, 7)),
            frame(HEADERS, PADDED | PRIORITISED, 1, padded),
            frame(CONTINUATION, 0, 1, fields[10:20]),
            frame(CONTINUATION, END_HEADERS, 1, fields[20:]),
            frame(0xEE, 0, 1, b"an extension"),
            frame(DATA, PADDED, 1, bytes((7,)) + ASKED[:3] + bytes(7)),
            frame(DATA, 0, 1),
            frame(DATA, PADDED, 1, bytes((255,)) + ASKED[3:] + bytes(255)),
            frame(HEADERS, END_HEADERS | END_STREAM, 1, block({"checksum": "none"})),
        )
        assert await peer.answer(1) == (ASKED, {"grpc-status": "0"})


async def test_calls_at_once_are_each_answered() -> None:
    async with listening() as server, connected(server.port) as peer:
        streams = [peer.ask(b"%d" % number) for number in range(300)]
        for number, asked in enumerate(streams):
            data, _ = await peer.answer(asked)
            assert BytesValue.FromString(data[5:]).value == b"%d" % number


@pytest.mark.parametrize("calls", [1, 4, 300])
async def test_replies_that_are_made_at_once_are_written_together(calls: int) -> None:
    wire, loop = Wire(), asyncio.get_running_loop()
    opened = GrpcConnection(
        ServerState(ConnectionLimit()), Service(MethodProbe().methods(), 2**20), loop
    )
    opened.connection_made(wire)
    opened.data_received(PREFACE + settings())
    before = wire.writes
    asked = (head(2 * n + 1) + frame(DATA, END_STREAM, 2 * n + 1, ASKED) for n in range(calls))
    opened.data_received(b"".join(asked))
    while wire.written.count(ASKED) < calls:
        await asyncio.sleep(0)
    assert wire.writes - before <= 1 + calls // 60
    opened.connection_lost(None)


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"path": "/probe.Probe/Nothing"}, "12", "Method not found!"),
        ({"path": "/Nobody/Echo"}, "12", "Method not found!"),
        ({"path": "/probe.Probe/Fail"}, "5", "100 %25 na%C3%AFve"),
        ({"path": "/probe.Probe/Break"}, "13", "internal error"),
        # The client's own deadline has the words of gRPC's libraries, a model's limit has Triton's.
        ({"path": "/probe.Probe/Late", "grpc_timeout": "10m"}, "4", "Deadline Exceeded"),
        ({"path": "/probe.Probe/Late", "grpc_timeout": "60S"}, "14", "Request timeout expired"),
        ({"path": "/probe.Probe/Late"}, "14", "Request timeout expired"),
        ({"grpc_encoding": "snappy"}, "12", "the message encoding is not supported; use gzip, "),
        ({"grpc_timeout": "soon"}, "13", "invalid grpc-timeout: "),
    ],
)
async def test_an_error_is_trailers_only(
    changes: dict[str, str], status: str, message: str
) -> None:
    async with listening() as server, connected(server.port) as peer:
        asked = peer.ask("100 % naïve".encode(), **changes)
        data, fields = await peer.answer(asked)
        assert (data, fields[":status"], fields["grpc-status"]) == (b"", "200", status)
        assert fields["grpc-message"].startswith(message)
        assert sum(got[0] == HEADERS for got in peer.seen) == 1
        await peer.serves()


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"method": "GET"}, "405"), ({"content_type": "application/json"}, "415")],
)
async def test_a_request_that_is_not_grpc_gets_an_explanation(
    changes: dict[str, str], status: str
) -> None:
    async with listening() as server, connected(server.port) as peer:
        data, _ = await peer.answer(peer.ask(**changes))
        fields = dict(peer.decoder.decode(next(f[3] for f in peer.seen if f[0] == HEADERS)))
        assert fields[":status"] == status
        assert b"this port serves gRPC" in data
        await peer.serves()


@pytest.mark.parametrize(
    "request_line", [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"POST /v2 HTTP/1.0\r\n\r\n"]
)
async def test_an_http1_request_gets_a_505_that_names_the_protocol(request_line: bytes) -> None:
    async with listening() as server, connected(server.port, request_line) as peer:
        answer = await within(peer.reader.read())
    assert answer.startswith(b"HTTP/1.1 505 ")
    assert b"this port serves gRPC: HTTP/2 with prior knowledge" in answer


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", "13"),
        (ASKED[:-1], "13"),
        (ASKED + b"x", "13"),
        (ASKED * 2, "13"),
        (b"\1" + ASKED[1:], "13"),
        (b"\2" + ASKED[1:], "13"),
        (prefixed(b"\xff\xff"), "3"),
        (b"\0\xff\xff\xff\xff" + bytes(100), "8"),
    ],
)
@pytest.mark.parametrize("parts", [1, 2, 1000])
async def test_a_body_that_is_no_message_is_refused(body: bytes, status: str, parts: int) -> None:
    size = max(1, -(-len(body) // parts))
    async with listening() as server, connected(server.port) as peer:
        peer.send(head(1))
        for at in range(0, len(body), size):
            peer.send(frame(DATA, 0, 1, body[at : at + size]))
        peer.send(frame(DATA, END_STREAM, 1))
        assert (await peer.answer(1))[1]["grpc-status"] == status
        peer._next = 3
        await peer.serves()


@pytest.mark.parametrize(
    ("encoding", "bits"), [("gzip", 16 + zlib.MAX_WBITS), ("deflate", zlib.MAX_WBITS)]
)
async def test_a_compressed_message_is_taken_up_to_its_limit(encoding: str, bits: int) -> None:
    def packed(message: bytes) -> bytes:
        deflater = zlib.compressobj(wbits=bits)
        content = deflater.compress(message) + deflater.flush()
        return struct.pack(">BI", 1, len(content)) + content

    async with listening() as server, connected(server.port) as peer:
        peer.send(head(1, grpc_encoding=encoding), frame(DATA, END_STREAM, 1, packed(MESSAGE)))
        assert await peer.answer(1) == (ASKED, {"grpc-status": "0"})
        bomb = packed(bytes(2**21))
        peer.send(head(3, grpc_encoding=encoding), frame(DATA, END_STREAM, 3, bomb))
        assert (await peer.answer(3))[1]["grpc-status"] == "8"


async def test_a_call_whose_time_is_over_is_cut_off() -> None:
    probe = MethodProbe()
    async with listening(probe) as server, connected(server.port) as peer:
        asked = peer.ask(path="/probe.Probe/Wait", grpc_timeout="50m")
        _, fields = await peer.answer(asked)
        assert fields["grpc-status"] == "4"
        await within(probe.cancelled.wait())


@pytest.mark.parametrize(("end", "status"), [("_expire", "4"), ("stall", "1"), ("cancel", "14")])
async def test_a_call_that_is_cut_off_before_its_handler_begins_is_answered(
    end: str, status: str
) -> None:
    """A task that is cancelled before its first step never runs, and ends nothing it holds."""
    wire, loop = Wire(), asyncio.get_running_loop()
    state = ServerState(ConnectionLimit())
    opened = GrpcConnection(state, Service(MethodProbe().methods(), 2**20), loop)
    opened.connection_made(wire)
    asked = head(1, path="/probe.Probe/Wait") + frame(DATA, END_STREAM, 1, ASKED)
    opened.data_received(PREFACE + settings() + asked)
    (call,) = state.requests
    getattr(call, end)()
    for _ in range(3):  # its first step, its end, and the callbacks
        await asyncio.sleep(0)
    assert b"grpc-status" + bytes((len(status),)) + status.encode() in wire.written
    assert not state.requests
    opened.connection_lost(None)


@pytest.mark.parametrize("value", ["ends in a blank ", " begins with one", "\t"])
async def test_metadata_with_blanks_at_its_ends_is_taken(value: str) -> None:
    async with listening() as server, connected(server.port) as peer:
        assert (await peer.answer(peer.ask(x_note=value)))[1] == {"grpc-status": "0"}


async def test_a_message_past_the_limit_is_refused_before_it_comes() -> None:
    async with listening(max_message=1000) as server, connected(server.port) as peer:
        peer.send(head(1), frame(DATA, 0, 1, b"\0" + (1001).to_bytes(4)))
        _, fields = await peer.answer(1)
        assert fields["grpc-status"] == "8"
        assert "1001 vs. 1000" in fields["grpc-message"]
        assert "--http-max-input-size" in fields["grpc-message"]


# -- flow control ---------------------------------------------------------------------------------


@CLEAR_TEXT
@pytest.mark.parametrize("size", [1, 70_000, 5_000_000, 50_000_000])
async def test_a_message_of_any_size_comes_back_to_grpcs_own_client(size: int) -> None:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with (
        listening(max_message=2**26) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options) as channel,
    ):
        message = BytesValue(value=bytes(size)).SerializeToString()
        assert await channel.unary_unary("/probe.Probe/Echo")(message, timeout=60) == message


async def test_a_reply_waits_for_flow_control_windows_and_resumes() -> None:
    large = bytes(range(256)) * 1000
    async with (
        listening() as server,
        connected(server.port, PREFACE + settings((INITIAL_WINDOW_SIZE, 10))) as peer,
    ):
        content = BytesValue(value=large).SerializeToString()
        peer.send(head(1))
        for at in range(0, len(content) + 5, 16_000):
            part = prefixed(content)[at : at + 16_000]
            peer.send(frame(DATA, 0, 1, part))
        peer.send(frame(DATA, END_STREAM, 1))
        got = b""
        while len(got) < 10:
            got += (await peer.until(DATA))[3]
        assert len(got) == 10
        peer.send(frame(PING, 0, 0, bytes(8)))
        assert (await peer.until(DATA, PING))[0] == PING  # nothing more until it may
        # A window may become negative, and then has to be opened by more.
        peer.send(settings((INITIAL_WINDOW_SIZE, 0)), window_update(1, 30))
        got += (await peer.until(DATA))[3]
        assert len(got) == 30
        peer.send(window_update(1, 10**6))
        while len(got) < 65_535:
            got += (await peer.until(DATA))[3]
        assert len(got) == 65_535  # the connection's
        peer.send(window_update(0, 10**6))
        rest, fields = await peer.answer(1)
        assert fields == {"grpc-status": "0"}
        assert got + rest == prefixed(content)


async def test_a_client_that_reads_slowly_holds_its_stream_up_and_not_the_memory() -> None:
    probe = MethodProbe()
    async with listening(probe) as server, connected(server.port) as peer:
        peer.send(
            head(1, path="/probe.Probe/Count"),
            frame(DATA, END_STREAM, 1, prefixed(Int64Value(value=10**6).SerializeToString())),
        )
        seen = 0
        while seen < 65_535:
            seen += len((await peer.until(DATA))[3])
        peer.send(frame(PING, 0, 0, bytes(8)))
        await peer.until(PING)
        assert probe.given <= 65_535 // 10_000 + 2
        peer.send(window_update(0, 20_000), window_update(1, 20_000))
        while seen < 85_535:
            seen += len((await peer.until(DATA))[3])
        assert probe.given <= 85_535 // 10_000 + 2
        peer.send(reset(1, 8))
        await within(probe.cancelled.wait())


async def test_a_client_that_opens_its_windows_and_reads_nothing_is_held_up_too() -> None:
    probe = MethodProbe()
    async with (
        listening(probe) as server,
        connected(server.port, PREFACE + settings((INITIAL_WINDOW_SIZE, MAX_WINDOW_BYTES))) as peer,
    ):
        peer.reader._limit = 2**16  # type: ignore[attr-defined]
        peer.send(
            window_update(0, MAX_WINDOW_BYTES - 65_535),
            head(1, path="/probe.Probe/Count"),
            frame(DATA, END_STREAM, 1, prefixed(Int64Value(value=10**6).SerializeToString())),
        )
        given = -1
        while given != probe.given:
            given = probe.given
            await asyncio.sleep(0.1)  # the pace of the client, which is what is tested
        assert 0 < given < 10_000  # of a million: what sockets hold
        peer.writer.transport.abort()
        await within(probe.cancelled.wait())


async def test_a_handler_that_reads_slowly_holds_the_client_up() -> None:
    probe = MethodProbe()
    async with listening(probe) as server, connected(server.port) as peer:
        peer.send(head(1, path="/probe.Probe/Slow"))
        content = prefixed(BytesValue(value=bytes(10_000)).SerializeToString())
        allowed, sent, messages = http2_settings.STREAM_WINDOW_BYTES, 0, 0
        while sent + len(content) <= allowed:
            peer.send(frame(DATA, 0, 1, content))
            sent += len(content)
            messages += 1
        peer.send(frame(PING, 0, 0, bytes(8)))
        await peer.until(PING)
        assert not any(got[0] == WINDOW_UPDATE and got[2] == 1 for got in peer.seen)
        probe.release.set()
        await peer.until(WINDOW_UPDATE, stream=1)
        peer.send(frame(DATA, END_STREAM, 1, content))
        data, _ = await peer.answer(1)
        assert BytesValue.FromString(data[5:]).value == b"%d" % (10_000 * (messages + 1))


async def test_a_stream_talks_both_ways() -> None:
    async with listening() as server, connected(server.port) as peer:
        peer.send(head(1, path="/probe.Probe/Talk"))
        for _ in range(3):
            peer.send(frame(DATA, 0, 1, ASKED[:7]))
            peer.send(frame(DATA, 0, 1, ASKED[7:]))
            assert (await peer.until(DATA))[3] == ASKED
        peer.send(frame(DATA, END_STREAM, 1))
        assert await peer.answer(1) == (b"", {"grpc-status": "0"})


@pytest.mark.parametrize(
    "most", [stream.TURN_MESSAGES, 1 << 30], ids=["", "known-bad: all at once"]
)
async def test_messages_that_come_together_leave_the_event_loop_to_others(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12,000 questions to the server reflection in 60 KB held the loop for 0.3 s of CPU time."""
    monkeypatch.setattr(stream, "TURN_MESSAGES", most)
    probe, taken = MethodProbe(), [0]

    async def talk(messages: AsyncIterator[Any], _: Deadline) -> AsyncIterator[Any]:
        async for message in messages:
            taken[-1] += 1
            yield message

    def turn() -> None:
        """Begin another count with each turn of the event loop."""
        if taken[-1]:
            taken.append(0)
        loop.call_soon(turn)

    monkeypatch.setattr(probe, "_talk", talk)
    loop = asyncio.get_running_loop()
    async with listening(probe) as server, connected(server.port) as peer:
        peer.send(head(1, path="/probe.Probe/Talk"))
        loop.call_soon(turn)
        peer.send(frame(DATA, END_STREAM, 1, prefixed(b"") * 1000))
        assert await peer.answer(1) == (prefixed(b"") * 1000, {"grpc-status": "0"})
    assert sum(taken) == 1000
    assert (max(taken) <= 64) is (most <= 64)


async def test_a_stream_that_ends_within_a_message_is_an_error() -> None:
    async with listening() as server, connected(server.port) as peer:
        peer.send(head(1, path="/probe.Probe/Talk"), frame(DATA, END_STREAM, 1, ASKED + ASKED[:7]))
        assert (await peer.answer(1))[1]["grpc-status"] == "13"


# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["reset", "connection"])
async def test_a_client_that_gives_up_cancels_the_handler(end: str) -> None:
    probe = MethodProbe()
    async with listening(probe) as server, connected(server.port) as peer:
        asked = peer.ask(path="/probe.Probe/Wait")
        await within(probe.begun.wait())
        if end == "reset":
            peer.send(reset(asked, 8))
        else:
            peer.writer.transport.abort()
        await within(probe.cancelled.wait())
        if end == "reset":
            await peer.serves()
            assert not any(got[2] == asked and got[0] in (HEADERS, RST_STREAM) for got in peer.seen)


async def test_an_early_answer_stops_the_body_and_data_in_flight_is_no_error() -> None:
    async with listening() as server, connected(server.port) as peer:
        peer.send(head(1, path="/probe.Probe/Nothing"), frame(DATA, 0, 1, ASKED))
        assert (await peer.answer(1))[1]["grpc-status"] == "12"
        assert await peer.code(RST_STREAM) == ErrorCode.NO_ERROR
        peer.send(frame(DATA, 0, 1, ASKED), frame(DATA, END_STREAM, 1, ASKED))
        peer._next = 3
        await peer.serves()


async def test_a_drain_says_so_twice_finishes_calls_and_takes_those_on_their_way() -> None:
    probe = MethodProbe()
    async with listening(probe) as server, connected(server.port) as peer:
        waiting = peer.ask(path="/probe.Probe/Wait")
        await within(probe.begun.wait())
        draining = asyncio.create_task(server.drain(Deadline.after(5)))
        payload = (await peer.until(GOAWAY))[3]
        assert struct.unpack(">II", payload) == (MAX_STREAM, ErrorCode.NO_ERROR)
        await peer.serves()  # it was on its way
        payload = (await peer.until(GOAWAY))[3]
        assert struct.unpack(">II", payload) == (waiting + 2, ErrorCode.NO_ERROR)
        late = peer.ask()
        probe.release.set()
        assert (await peer.answer(waiting))[1] == {"grpc-status": "0"}
        assert await within(peer.reader.read()) == b""
        assert not any(got[2] == late for got in peer.seen)
        peer.writer.close()
        await within(draining)


async def test_a_drain_cuts_off_at_its_deadline_in_good_order() -> None:
    probe = MethodProbe()
    async with listening(probe) as server, connected(server.port) as peer:
        waiting = peer.ask(path="/probe.Probe/Wait")
        await within(probe.begun.wait())
        draining = asyncio.create_task(server.drain(Deadline.after(0.5)))
        _, fields = await peer.answer(waiting)
        assert (fields["grpc-status"], fields["grpc-message"]) == (
            "14",
            "the server is shutting down",
        )
        await within(draining)


async def test_a_client_that_goes_away_gets_its_answers() -> None:
    probe = MethodProbe()
    async with listening(probe) as server, connected(server.port) as peer:
        waiting = peer.ask(path="/probe.Probe/Wait")
        await within(probe.begun.wait())
        peer.send(frame(GOAWAY, 0, 0, struct.pack(">II", 0, 0)))
        probe.release.set()
        assert (await peer.answer(waiting))[1] == {"grpc-status": "0"}


# -- what breaks the protocol ---------------------------------------------------------------------

DAMAGED = block({**REQUEST, "x-bad": "a\nb"})


def fields(*rows: tuple[str, str]) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, 1, block(list(rows)))


ROWS = list(REQUEST.items())
#: What ends one stream, with which code. The rest of the connection goes on.
BROKEN_STREAMS: dict[str, tuple[bytes, int]] = {
    "no path": (fields(*[r for r in ROWS if r[0] != ":path"]), ErrorCode.PROTOCOL_ERROR),
    "empty path": (
        fields(*[(k, "" if k == ":path" else v) for k, v in ROWS]),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "pseudo twice": (fields((":method", "GET"), *ROWS), ErrorCode.PROTOCOL_ERROR),
    "pseudo behind": (fields(*ROWS[1:], ROWS[0]), ErrorCode.PROTOCOL_ERROR),
    "unknown pseudo": (fields((":status", "200"), *ROWS), ErrorCode.PROTOCOL_ERROR),
    "upper case": (fields(*ROWS, ("X-Upper", "1")), ErrorCode.PROTOCOL_ERROR),
    "line break": (frame(HEADERS, END_HEADERS | END_STREAM, 1, DAMAGED), ErrorCode.PROTOCOL_ERROR),
    "connection": (fields(*ROWS, ("connection", "close")), ErrorCode.PROTOCOL_ERROR),
    "te": (fields(*ROWS[:4], ("te", "gzip")), ErrorCode.PROTOCOL_ERROR),
    "content-length": (
        head(1, content_length="7") + frame(DATA, END_STREAM, 1, ASKED),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "headers within": (head(1) + head(1), ErrorCode.PROTOCOL_ERROR),
    "pseudo trailers": (head(1) + head(1, END_HEADERS | END_STREAM), ErrorCode.PROTOCOL_ERROR),
    "window by nothing": (head(1) + window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
    "window too large": (
        head(1) + window_update(1, MAX_WINDOW_BYTES),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "data beyond the window": (
        head(1) + frame(DATA, 0, 1, prefixed(bytes(2**20))[: 2**20]) + frame(DATA, 0, 1, bytes(9)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize("case", BROKEN_STREAMS)
async def test_a_malformed_call_is_reset_and_the_connection_stays_open(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream.GrpcStream, "_grant", lambda _: None)  # the window stays as it began
    sent, code = BROKEN_STREAMS[case]
    async with listening() as server, connected(server.port) as peer:
        peer.send(sent)
        assert await peer.code(RST_STREAM) == code
        peer._next = 3
        await peer.serves()


async def test_a_call_too_many_is_refused_and_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http2_settings, "MAX_STREAMS", 2)
    probe = MethodProbe()
    async with listening(probe) as server, connected(server.port) as peer:
        first, second = (peer.ask(path="/probe.Probe/Wait") for _ in range(2))
        third = peer.ask()
        assert (await peer.until(RST_STREAM))[2:] == (
            third,
            struct.pack(">I", ErrorCode.REFUSED_STREAM),
        )
        probe.release.set()
        for each in (first, second):
            assert (await peer.answer(each))[1] == {"grpc-status": "0"}
        await peer.serves()


async def test_data_on_a_stream_that_has_ended_ends_the_connection() -> None:
    async with listening() as server, connected(server.port) as peer:
        await peer.serves()
        peer.send(frame(DATA, 0, 1, b"x"))
        assert await peer.code() == ErrorCode.STREAM_CLOSED


@CLEAR_TEXT
async def test_a_call_on_one_connection_too_many_gets_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening_socket, "MAX_CONNECTIONS", 1)
    async with listening() as server, connected(server.port) as first:
        await first.serves()
        async with connected(server.port) as second:
            asked = second.ask(path="/probe.Probe/Health")
            assert (await second.answer(asked))[1] == {"grpc-status": "0"}
            _, fields = await second.answer(second.ask())
            assert (fields["grpc-status"], fields["grpc-message"]) == ("14", "too many connections")
            await second.until(GOAWAY)
        monkeypatch.setattr(listening_socket, "HEALTH_CONNECTIONS", 0)
        async with connected(server.port) as third:
            assert (await third.until(GOAWAY))[3].endswith(b"too many connections")
        await first.serves()


# -- time -----------------------------------------------------------------------------------------

#: What a client has sent when it falls silent, and whether it is told that it is ended.
SILENT: dict[str, tuple[bytes, bool]] = {
    "nothing": (b"", False),
    "half a preface": (PREFACE[:10], False),
    "no settings": (PREFACE, True),
    "half a frame": (PREFACE + settings() + head(1)[:20], True),
    "half a block": (PREFACE + settings() + head(1, 0), True),
}


@pytest.mark.parametrize("case", SILENT)
async def test_a_connection_that_stalls_midway_is_closed(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(time_limits, "CHECK_SECONDS", 0.05)
    sent, told = SILENT[case]
    async with listening() as server, connected(server.port, sent) as peer:
        if told:
            assert await peer.code() == ErrorCode.PROTOCOL_ERROR
        assert await within(peer.reader.read()) == b""


async def test_a_connection_that_is_idle_between_calls_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "HEAD_SECONDS", 0.1)
    monkeypatch.setattr(time_limits, "CHECK_SECONDS", 0.02)
    async with listening() as server, connected(server.port) as peer:
        await peer.serves()
        await asyncio.sleep(0.4)  # the pace of the client, which is what is tested
        await peer.serves()


async def test_a_connection_without_a_call_is_ended_and_one_with_a_call_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits, "KEEP_ALIVE_SECONDS", 0.2)
    monkeypatch.setattr(time_limits, "CHECK_SECONDS", 0.02)
    probe = MethodProbe()
    async with (
        listening(probe) as server,
        connected(server.port) as idle,
        connected(server.port) as busy,
    ):
        waiting = busy.ask(path="/probe.Probe/Wait")
        await idle.serves()
        assert await idle.code() == ErrorCode.NO_ERROR
        assert await within(idle.reader.read()) == b""
        probe.release.set()
        assert (await busy.answer(waiting))[1] == {"grpc-status": "0"}


@pytest.mark.parametrize("method", ["Echo", "Talk"])
async def test_a_stalled_body_is_given_up(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "BODY_IDLE_SECONDS", 0.1)
    monkeypatch.setattr(time_limits, "CHECK_SECONDS", 0.02)
    async with listening() as server, connected(server.port) as peer:
        peer.send(head(1, path=f"/probe.Probe/{method}"), frame(DATA, 0, 1, ASKED[:7]))
        _, fields = await peer.answer(1)
        assert fields["grpc-message"] == "the request's body has stalled"
        assert await peer.code(RST_STREAM) == ErrorCode.NO_ERROR


async def test_a_stream_between_messages_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "BODY_IDLE_SECONDS", 0.1)
    monkeypatch.setattr(time_limits, "CHECK_SECONDS", 0.02)
    async with listening() as server, connected(server.port) as peer:
        peer.send(head(1, path="/probe.Probe/Talk"), frame(DATA, 0, 1, ASKED))
        assert (await peer.until(DATA))[3] == ASKED
        await asyncio.sleep(0.4)  # the pace of the client, which is what is tested
        peer.send(frame(DATA, END_STREAM, 1, ASKED))
        assert await peer.answer(1) == (ASKED, {"grpc-status": "0"})


async def test_a_ping_is_answered_and_settings_are_acknowledged() -> None:
    async with listening() as server, connected(server.port) as peer:
        peer.send(frame(PING, 0, 0, b"12345678"), frame(PING, ACK, 0, b"87654321"))
        assert (await peer.until(PING))[1:] == (ACK, 0, b"12345678")
        assert any(got[:2] == (SETTINGS, ACK) for got in peer.seen)
        await peer.serves()
