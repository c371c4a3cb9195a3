"""HTTP/2 on the HTTP port, by prior knowledge: the same handlers within the same limits."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest

from modelport.gateway.protocols.http_message import (
    Answer,
    ClientDisconnected,
    Handler,
    HttpRequest,
    HttpResponse,
)
from modelport.gateway.runtime import request_memory
from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.server import listening_socket, time_limits
from modelport.gateway.server.http1.connection import HttpConnection
from modelport.gateway.server.http1.exchange import HttpServerState
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.http1.read_buffer import SLICE_BYTES
from modelport.gateway.server.http2.http import Http2ServerConnection
from modelport.gateway.server.listening_socket import ConnectionLimit, bind
from modelport.gateway.types import Deadline
from modelport.gateway.wire import via_header
from modelport.gateway.wire.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_STREAM,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    WINDOW_UPDATE,
    ErrorCode,
    frame,
    reset,
    settings,
    window_update,
)
from modelport.gateway.wire.http2.settings import STREAM_WINDOW_BYTES
from tests.gateway.server.grpc_peer import SETTLED, GrpcPeer, Wire, block, connected, within
from tests.gateway.server.handlers import body_of, echo, echo_body, on_body
from tests.gateway.server.test_http1 import (
    ContextProbe,
    EndlessStream,
    Stuck,
    breaking,
    listening,
    post,
    streamed,
)

pytestmark = pytest.mark.usefixtures("transport")
#: The client of the test decides: it is not asyncio's, or TLS has no word for what it does.
CLEAR_TEXT = pytest.mark.parametrize("transport", ["clear text"], indirect=True)

ROWS = {":method": "POST", ":scheme": "http", ":path": "/a", ":authority": "probe"}


def head(stream: int, flags: int = END_HEADERS, **changes: str) -> bytes:
    renamed = {f":{k}" if f":{k}" in ROWS else k.replace("_", "-"): v for k, v in changes.items()}
    return frame(HEADERS, flags, stream, block({**ROWS, **renamed}))


def request(stream: int, body: bytes = b"body", **changes: str) -> bytes:
    return head(stream, **changes) + frame(DATA, END_STREAM, stream, body)


async def response(peer: GrpcPeer, stream: int) -> tuple[dict[str, str], bytes]:
    """The fields and the body."""
    fields, data = {}, b""
    while True:
        kind, flags, _, payload = await peer.until(HEADERS, DATA, RST_STREAM, stream=stream)
        assert kind != RST_STREAM, f"reset with {payload!r}"
        if kind == DATA:
            data += payload
        else:
            fields = dict(peer.decoder.decode(payload))
        if flags & END_STREAM:
            return fields, data


@contextlib.asynccontextmanager
async def speaking(
    handler: Handler, greeting: bytes = PREFACE + SETTLED, **options: Any
) -> AsyncIterator[GrpcPeer]:
    async with listening(handler, **options) as port, connected(port, greeting) as peer:
        yield peer


# -- clients --------------------------------------------------------------------------------------


@CLEAR_TEXT
async def test_a_client_of_another_make_gets_what_it_gets_over_http1() -> None:
    large = bytes(range(256)) * 20_000
    numbers = [b"%d" % number for number in range(50)]
    async with listening(echo) as port:
        for version, http2 in (("HTTP/1.1", False), ("HTTP/2", True)):
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, http1=not http2, http2=http2) as client:
                posts = [client.post("/p", content=number) for number in numbers]
                got = [
                    await client.get("/x%20y?q=1"),
                    await client.post("/p", content=large),
                    await client.head("/h"),
                    *await asyncio.gather(*posts),
                ]
            assert {answer.http_version for answer in got} == {version}
            assert got[0].content == b"GET /x y False "
            assert got[1].content == b"POST /p False " + large
            assert (got[2].content, got[2].headers["content-length"]) == (b"", "14")
            assert [answer.content[14:] for answer in got[3:]] == numbers
            assert all("date" in answer.headers for answer in got)


@CLEAR_TEXT
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
async def test_curl_with_prior_knowledge_is_answered() -> None:
    async with listening(streamed) as port:
        command = ("curl", "-sS", "--http2-prior-knowledge", "-d", "x", "-w", "%{http_version}")
        process = await asyncio.create_subprocess_exec(
            *command, f"http://127.0.0.1:{port}/", stdout=-1
        )
        assert await within(process.communicate()) == (b"onetwo2", None)


@CLEAR_TEXT
async def test_a_handler_sees_the_request_as_over_http1() -> None:
    requests = list[HttpRequest]()

    def look(request: HttpRequest) -> Answer:
        requests.append(request)
        return echo_body(request)

    async with speaking(look) as peer:
        peer.send(request(1, path="/x%20y?q=1", x_note=" kept "))
        assert (await response(peer, 1))[1] == b"body"
    [found] = requests
    assert (found.path, found.raw_path, found.query) == ("/x y", b"/x%20y", b"q=1")
    assert (found.version, found.method, found.peer.scheme) == ("2", "POST", "http")
    assert found.headers == [(b"host", b"probe"), (b"x-note", b"kept")]
    assert found.peer.client is not None
    assert found.peer.server is not None
    assert found.peer.client[0] == found.peer.server[0] == "127.0.0.1"


async def test_requests_of_a_connection_share_no_context_variables() -> None:
    probe = ContextProbe()
    async with speaking(probe) as peer:
        peer.send(request(1), request(3), head(5), head(7), frame(DATA, 0, 5, b"x"))
        peer.send(*[frame(DATA, END_STREAM, stream, b"y") for stream in (5, 7)], request(9))
        for _ in range(5):
            await peer.until(DATA)
    probe.check(requests=5)


@pytest.mark.parametrize("size", [1, 3, 17, 23, 24, 25, 1000])
async def test_a_preface_in_any_segments_begins_http2(size: int) -> None:
    content = PREFACE + SETTLED + request(1)
    async with listening(echo) as port, connected(port, b"") as peer:
        for at in range(0, len(content), size):
            peer.send(content[at : at + size])
            await peer.writer.drain()
            await asyncio.sleep(0)
        assert (await response(peer, 1))[1] == b"POST /a False body"


async def test_a_large_body_in_the_segment_of_the_preface_is_kept() -> None:
    @on_body
    def measure(request: HttpRequest, body: bytes) -> HttpResponse:
        return HttpResponse(200, b"%d" % len(body))

    parts = [frame(DATA, 0, 1, bytes(16_000))] * (4 * SLICE_BYTES // 16_000)
    async with listening(measure) as port, connected(port, b"") as peer:
        peer.send(PREFACE + SETTLED + head(1), *parts, frame(DATA, END_STREAM, 1))
        assert (await response(peer, 1))[1] == b"%d" % (16_000 * len(parts))


async def test_a_preface_behind_a_request_is_no_preface() -> None:
    """Else a proxy that sees HTTP/1.1 could be made to tunnel."""
    async with listening(echo) as port, connected(port, post(b"1")) as peer:
        assert (await within(peer.reader.readuntil(b"False 1"))).startswith(b"HTTP/1.1 200 ")
        peer.send(PREFACE + SETTLED + request(1))
        assert (await within(peer.reader.read())).startswith(b"HTTP/1.1 400 ")


async def test_alpn_chooses_http2() -> None:
    class Tls(Wire):
        chosen: asyncio.BaseProtocol | None = None

        def get_extra_info(self, name: str, default: object = None) -> object:
            return self if name in ("ssl_object", "socket") else default

        def selected_alpn_protocol(self) -> str:
            return "h2"

        def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
            self.chosen = protocol

        def pause_reading(self) -> None: ...

        def resume_reading(self) -> None: ...

    wire, state = Tls(), HttpServerState(echo, ConnectionLimit(), (), (), None)
    first = HttpConnection(state, asyncio.get_running_loop())
    first.connection_made(wire)
    assert isinstance(wire.chosen, Http2ServerConnection)
    assert list(state.connections) == [wire.chosen]
    wire.chosen.data_received(PREFACE + SETTLED + request(1))
    while b"POST /a False body" not in wire.written:
        await asyncio.sleep(0)
    wire.chosen.connection_lost(None)


# -- responses ------------------------------------------------------------------------------------


async def test_a_stream_of_parts_is_sent_as_they_are_made() -> None:
    async with speaking(streamed) as peer:
        peer.send(request(1))
        fields, body = await response(peer, 1)
        assert body == b"onetwo"
        assert "transfer-encoding" not in fields
        assert [got[3] for got in peer.seen if got[0] == DATA] == [b"one", b"two", b""]


async def test_a_response_without_a_body_ends_with_its_head() -> None:
    headers = [(b"connection", b"close")]
    async with speaking(lambda request: HttpResponse(204, b"dropped", headers)) as peer:
        peer.send(request(1))
        fields, body = await response(peer, 1)
        assert (fields[":status"], body, "connection" in fields) == ("204", b"", False)
        assert not any(got[0] == DATA for got in peer.seen)


async def test_continue_is_said_when_the_body_is_asked_for() -> None:
    async with speaking(echo) as peer:
        peer.send(head(1, expect="100-continue"))
        payload = (await peer.until(HEADERS))[3]
        assert dict(peer.decoder.decode(payload)) == {":status": "100"}
        peer.send(frame(DATA, END_STREAM, 1, b"body"))
        assert (await response(peer, 1))[1] == b"POST /a False body"


@pytest.mark.parametrize("when", ["at once", "before", "amid", "header"])
async def test_a_handler_that_breaks_down_ends_its_stream_only(when: str) -> None:
    breaks = breaking(when)

    def app(request: HttpRequest) -> Answer:
        if request.path == "/ok":
            return HttpResponse(200, b"ok")
        if when == "header":
            return HttpResponse(200, b"", [(b"x", b"1\r\nset-cookie: 2")])
        return breaks(request)

    async with speaking(app) as peer:
        peer.send(request(1))
        if when == "amid":
            assert await peer.code(RST_STREAM) == ErrorCode.INTERNAL_ERROR
        else:
            fields, body = await response(peer, 1)
            assert (fields[":status"], body) == ("500", b'{"error":"internal error"}')
        peer.send(request(3, path="/ok"))
        assert (await response(peer, 3))[1] == b"ok"


async def test_the_rest_of_a_body_that_was_answered_early_is_not_asked_for() -> None:
    async with speaking(lambda request: HttpResponse(200, b"early")) as peer:
        peer.send(head(1), frame(DATA, 0, 1, b"x"))
        assert (await response(peer, 1))[1] == b"early"
        assert await peer.code(RST_STREAM) == ErrorCode.NO_ERROR
        peer.send(frame(DATA, END_STREAM, 1, b"on its way"), request(3))
        assert (await response(peer, 3))[1] == b"early"


# -- malformed requests ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "a"},
        {"path": "*"},
        {"path": "/ü"},
        {"path": "/a b"},
        {"host": "another"},
        {"content_length": "9"},
    ],
)
async def test_a_malformed_request_is_reset(changes: dict[str, str]) -> None:
    await expect_reset(request(1, **changes))


async def test_two_hosts_are_reset() -> None:
    rows = [row for row in ROWS.items() if row[0] != ":authority"]
    await expect_reset(
        frame(HEADERS, END_HEADERS, 1, block([*rows, ("host", "probe"), ("host", "other")]))
    )


async def expect_reset(malformed: bytes) -> None:
    async with speaking(echo) as peer:
        peer.send(malformed)
        assert await peer.code(RST_STREAM) == ErrorCode.PROTOCOL_ERROR
        peer.send(request(3))
        assert (await response(peer, 3))[1] == b"POST /a False body"


# -- clients that go ------------------------------------------------------------------------------


@pytest.mark.parametrize("goes", ["reset", "connection"])
async def test_a_client_that_goes_cancels_its_request(goes: str) -> None:
    app = Stuck()
    async with speaking(app) as peer:
        peer.send(request(1))
        await within(app.begun.wait())
        if goes == "reset":
            peer.send(reset(1, ErrorCode.CANCEL))
        else:
            peer.writer.transport.abort()
        await within(app.cancelled.wait())


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("goes", ["reset", "connection"])
async def test_a_client_that_goes_ends_a_stream(goes: str, waits: bool) -> None:
    stream = EndlessStream(waits)
    async with speaking(stream) as peer:
        peer.send(request(1))
        await peer.until(DATA)
        assert not stream.ended.is_set()
        if goes == "reset":
            peer.send(reset(1, ErrorCode.CANCEL))
        else:
            peer.writer.transport.abort()
        await within(stream.ended.wait())


async def test_a_handler_that_reads_a_body_learns_that_the_client_left() -> None:
    begun, told = asyncio.Event(), asyncio.Event()

    async def app(request: HttpRequest) -> HttpResponse:
        begun.set()
        try:
            await body_of(request)
        except ClientDisconnected:
            told.set()
            raise
        raise AssertionError

    async with speaking(app) as peer:
        peer.send(head(1), frame(DATA, 0, 1, b"x"))
        await within(begun.wait())
        peer.send(reset(1, ErrorCode.CANCEL))
        await within(told.wait())


# -- limits ---------------------------------------------------------------------------------------


async def test_a_body_that_the_handler_does_not_read_is_held_back() -> None:
    released = asyncio.Event()

    async def app(request: HttpRequest) -> HttpResponse:
        await released.wait()
        return HttpResponse(200, b"%d" % len(await body_of(request)))

    async with speaking(app) as peer:
        part = frame(DATA, 0, 1, bytes(16_384))
        count = STREAM_WINDOW_BYTES // 16_384
        peer.send(head(1), *[part] * count, frame(PING, 0, 0, bytes(8)))
        await peer.until(PING)
        assert not any(got[0] == WINDOW_UPDATE and got[2] == 1 for got in peer.seen)
        released.set()
        await peer.until(WINDOW_UPDATE, stream=1)
        peer.send(*[part] * count, frame(DATA, END_STREAM, 1))
        assert (await response(peer, 1))[1] == b"%d" % (2 * STREAM_WINDOW_BYTES)


async def test_bodies_that_never_end_hold_no_more_than_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROCESS, "limit_bytes", 500_000)
    async with speaking(echo) as peer:
        for stream in range(1, 13, 2):
            peer.send(head(stream), *[frame(DATA, 0, stream, bytes(10_000))] * 10)
        for _ in range(4):
            fields = dict(peer.decoder.decode((await peer.until(HEADERS))[3]))
            assert (fields[":status"], fields["retry-after"]) == ("503", "1")
        assert PROCESS.used_bytes <= 250_000  # a half is a connection's
        peer.send(request(21))
        assert (await response(peer, 21))[1] == b"POST /a False body"
    while PROCESS.used_bytes:
        await asyncio.sleep(0)


async def test_a_request_that_is_refused_holds_no_memory_whatever_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROCESS, "limit_bytes", 100_000)
    async with speaking(echo, PREFACE + settings((INITIAL_WINDOW_SIZE, 0))) as peer:
        peer.send(head(1), *[frame(DATA, 0, 1, bytes(10_000))] * 6)
        fields = dict(peer.decoder.decode((await peer.until(HEADERS))[3]))
        assert fields[":status"] == "503"
        peer.send(*[frame(DATA, 0, 1, bytes(10_000))] * 4, frame(PING, 0, 0, bytes(8)))
        await peer.until(PING)
        assert PROCESS.used_bytes < 10_000, "the answer alone, which is not read"


async def test_what_a_small_compressed_body_becomes_counts_in_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROCESS, "limit_bytes", 2_000_000)
    held: list[int] = []

    @on_body
    def app(request: HttpRequest, body: bytes) -> HttpResponse:
        request_memory.reserve(500_000)
        held.append(PROCESS.used_bytes)
        return HttpResponse(200)

    async with speaking(app) as peer:
        for stream, fields in ((1, {"content_encoding": "gzip"}), (3, {})):
            peer.send(request(stream, b"small", **fields))
            await response(peer, stream)
    assert held == [500_000, 500_000]
    assert PROCESS.used_bytes == 0


@pytest.mark.parametrize("value", [b"1\r\nset-cookie: 2", b"1\n2", b"1\r2", b"1\x002"])
async def test_a_header_with_a_line_break_is_not_sent_for_a_proxy_to_split(value: bytes) -> None:
    async with speaking(lambda request: HttpResponse(200, b"", [(b"x", value)])) as peer:
        peer.send(request(1))
        fields, _ = await response(peer, 1)
    assert fields[":status"] == "500"
    assert "x" not in fields


async def test_a_body_of_padding_alone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "BODY_IDLE_SECONDS", 0.1)
    monkeypatch.setattr(time_limits, "CHECK_SECONDS", 0.02)
    async with speaking(echo) as peer:
        peer.send(head(1), frame(DATA, 0, 1, b"x"))
        ended = asyncio.ensure_future(peer.until(HEADERS))
        while not ended.done():
            peer.send(frame(DATA, PADDED, 1, b"\7" + bytes(7)))
            await asyncio.wait({ended}, timeout=0.02)  # the pace of the client
        assert dict(peer.decoder.decode(ended.result()[3]))[":status"] == "408"


async def test_a_stalled_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "BODY_IDLE_SECONDS", 0.1)
    monkeypatch.setattr(time_limits, "CHECK_SECONDS", 0.02)
    async with speaking(echo) as peer:
        peer.send(head(1), frame(DATA, 0, 1, b"x"))
        fields, body = await response(peer, 1)
        assert (fields[":status"], body) == ("408", b'{"error":"Request Timeout"}')
        assert await peer.code(RST_STREAM) == ErrorCode.NO_ERROR
        peer.send(request(3))
        assert (await response(peer, 3))[0][":status"] == "200"


async def test_a_response_that_its_client_never_reads_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits, "UNREAD_SECONDS", 0.1)
    monkeypatch.setattr(time_limits, "CHECK_SECONDS", 0.02)
    async with speaking(echo, PREFACE + settings((INITIAL_WINDOW_SIZE, 5))) as peer:
        peer.send(request(1))
        assert await peer.code(RST_STREAM) == ErrorCode.CANCEL


async def test_a_slow_reader_holds_the_handler_up() -> None:
    given = 0

    async def parts() -> AsyncGenerator[bytes, None]:
        nonlocal given
        while given < 1000:
            yield bytes(10_000)
            given += 1

    async with speaking(lambda request: HttpResponse(200, parts=parts())) as peer:
        peer.send(request(1))
        size = 0
        while size < 65_535:
            size += len((await peer.until(DATA))[3])
        peer.send(frame(PING, 0, 0, bytes(8)))
        await peer.until(PING)
        assert given < 9
        peer.send(window_update(0, 2**30), window_update(1, 2**30))
        assert size + len((await response(peer, 1))[1]) == 10_000_000


async def test_health_is_answered_when_connections_are_exhausted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening_socket, "MAX_CONNECTIONS", 1)
    listener = HttpListener(echo, bind("127.0.0.1", 0, "--http-port"), health=[b"/ready"])
    await listener.start()
    greeting = PREFACE + SETTLED
    async with connected(listener.port, greeting), connected(listener.port, greeting) as second:
        second.send(request(1, path="/ready"))
        assert (await response(second, 1))[0][":status"] == "200"
        second.send(request(3))
        fields, body = await response(second, 3)
        assert (fields[":status"], body) == ("503", b'{"error":"too many connections"}')
        await second.until(GOAWAY)
    await listener.drain(Deadline.after(0))


async def test_a_request_that_came_through_this_gateway_is_refused() -> None:
    async with speaking(echo) as peer:
        peer.send(request(1, via=via_header.onward("2")))
        assert (await response(peer, 1))[0][":status"] == "508"


async def test_in_an_overload_a_request_is_refused_unread() -> None:
    async with speaking(echo, overloaded={1}, refuses=lambda path: path == b"/busy") as peer:
        peer.send(head(1, path="/busy"))
        fields, body = await response(peer, 1)
        assert (fields[":status"], fields["retry-after"]) == ("503", "1")
        assert body == b'{"error":"Exceeds maximum queue size"}'
        peer.send(request(3))
        assert (await response(peer, 3))[0][":status"] == "200"


# -- ends -----------------------------------------------------------------------------------------


async def test_a_drain_says_so_twice_and_finishes_requests() -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def wait() -> HttpResponse:
        begun.set()
        await release.wait()
        return HttpResponse(200, b"late")

    def app(request: HttpRequest) -> Answer:
        return wait() if request.path == "/wait" else HttpResponse(200, b"late")

    listener = HttpListener(app, bind("127.0.0.1", 0, "--http-port"))
    await listener.start()
    async with connected(listener.port, PREFACE + SETTLED) as peer:
        peer.send(request(1, path="/wait"))
        await within(begun.wait())
        draining = asyncio.create_task(listener.drain(Deadline.after(5)))
        assert (await peer.until(GOAWAY))[3][:4] == MAX_STREAM.to_bytes(4)
        peer.send(request(3))  # it was on its way
        assert (await response(peer, 3))[1] == b"late"
        assert (await peer.until(GOAWAY))[3] == (3).to_bytes(4) + bytes(4)
        release.set()
        assert (await response(peer, 1))[1] == b"late"
        assert await within(peer.reader.read()) == b""
        peer.writer.close()
        await within(draining)


async def test_a_request_that_outlasts_the_end_is_answered_503() -> None:
    app = Stuck()
    listener = HttpListener(app, bind("127.0.0.1", 0, "--http-port"))
    await listener.start()
    async with connected(listener.port, PREFACE + SETTLED) as peer:
        peer.send(request(1))
        await within(app.begun.wait())
        draining = asyncio.create_task(listener.drain(Deadline.after(0.5)))
        assert (await response(peer, 1))[0][":status"] == "503"
        await within(draining)


async def test_a_connection_without_a_request_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "KEEP_ALIVE_SECONDS", 0.2)
    monkeypatch.setattr(time_limits, "CHECK_SECONDS", 0.02)
    async with speaking(echo) as peer:
        peer.send(request(1))
        await response(peer, 1)
        assert await peer.code() == ErrorCode.NO_ERROR
        assert await within(peer.reader.read()) == b""
