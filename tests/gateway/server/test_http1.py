"""The HTTP/1.1 listener: one connection, byte for byte, against small applications."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from modelport.gateway.errors import MemoryExhausted
from modelport.gateway.protocols.asgi import App, Receive, Scope, Send
from modelport.gateway.runtime import request_memory
from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.server import listener as listener_module
from modelport.gateway.server import listening_socket, time_limits
from modelport.gateway.server.http1 import protocol, request_cycle, request_parser, unread_timer
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.listening_socket import NEWCOMER_SECONDS, bind
from modelport.gateway.types import Deadline
from modelport.gateway.wire import via_header
from tests.polling import until

pytestmark = pytest.mark.usefixtures("transport")
#: The client of the test decides: it is not asyncio's, or TLS has no word for what it does.
CLEAR_TEXT = pytest.mark.parametrize("transport", ["clear text"], indirect=True)

PATIENCE_SECONDS = 60.0
OK = b"HTTP/1.1 200 OK"


async def body_of(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def reply(send: Send, body: bytes, *headers: tuple[bytes, bytes], status: int = 200) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Method, path, whether an upgrade is offered, and the body."""
    offered = any(name == b"upgrade" for name, _ in scope["headers"])
    body = await body_of(receive)
    await reply(send, f"{scope['method']} {scope['path']} {offered} ".encode() + body)


class Stuck:
    """An application that never answers; what became of it."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@contextlib.asynccontextmanager
async def listening(app: App, **options: Any) -> AsyncIterator[int]:
    listener = HttpListener(app, bind("127.0.0.1", 0, "--http-port"), **options)
    await listener.start()
    try:
        yield listener.port
    finally:
        await listener.drain(Deadline.after(0))


class Http1Client:
    """A connection that is read reply by reply."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *segments: bytes) -> None:
        """Each in a TCP segment of its own, as far as the server can tell."""
        for segment in segments:
            self.writer.write(segment)
            await self.writer.drain()
            await asyncio.sleep(0.02)  # the pace of the client, which is what is tested

    async def reply(self) -> tuple[bytes, bytes]:
        """Head and body."""
        head = await within(self.reader.readuntil(b"\r\n\r\n"))
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-len")]
        size = int(length[0].partition(b":")[2]) if length else 0
        return head, await within(self.reader.readexactly(size))

    async def rest(self) -> bytes:
        return await within(self.reader.read())


async def within(answer: Awaitable[bytes]) -> bytes:
    return await asyncio.wait_for(answer, PATIENCE_SECONDS)


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Http1Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Http1Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def post(body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST /a HTTP/" + version, b"Host: a", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


OFFER = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA")
CHUNKED = b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
CHUNKS = b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\ntrailer: t\r\n\r\n"


# -- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [30, 60, 75, 95, 120, -3, -1])
async def test_an_offer_to_upgrade_in_any_two_segments_is_ignored(at: int) -> None:
    request = post(b"body", *OFFER)
    async with listening(echo) as port, connected(port) as client:
        await client.send(request[:at], request[at:])
        assert (await client.reply())[1] == b"POST /a False body"
        await client.send(post(b"next"))
        assert (await client.reply())[1] == b"POST /a False next"


async def test_offers_to_upgrade_amid_pipelined_requests_are_ignored() -> None:
    chunked = CHUNKED + b"\r\n".join([*OFFER, b"", CHUNKS])
    async with listening(echo) as port, connected(port) as client:
        await client.send(post(b"1") + post(b"2", *OFFER) + chunked + post(b"4", *OFFER) * 2)
        bodies = [(await client.reply())[1] for _ in range(5)]
    assert bodies == [b"POST /a False " + body for body in (b"1", b"2", b"abcde", b"4", b"4")]


async def test_a_request_in_segments_of_one_byte_is_a_request() -> None:
    async with listening(echo) as port, connected(port) as client:
        request = CHUNKED + b"\r\n" + CHUNKS
        for index in range(len(request)):
            client.writer.write(request[index : index + 1])
            await client.writer.drain()
        assert (await client.reply())[1] == b"POST /a False abcde"


async def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    under_way = most = 0

    async def slow_first(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        body = await body_of(receive)
        await asyncio.sleep(0.05 if body == b"0" else 0)
        under_way -= 1
        await reply(send, body)

    async with listening(slow_first) as port, connected(port) as client:
        await client.send(b"".join(post(b"%d" % n) for n in range(50)))
        assert [(await client.reply())[1] for _ in range(50)] == [b"%d" % n for n in range(50)]
    assert most == 1


async def test_a_pipelined_request_has_nothing_of_the_request_before_it() -> None:
    found: list[tuple[str, bool]] = []

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        lease = request_memory.CURRENT.get()
        found.append((via_header.CURRENT.get(), lease is None or not lease.size))
        await echo(scope, receive, send)

    large = b"x" * (2 * request_cycle.UNCOUNTED_BYTES)
    async with listening(look) as port, connected(port) as client:
        await client.send(post(large, b"via: 1.1 before") + post(b"small"))
        for body in (large, b"small"):
            assert (await client.reply())[1].endswith(body)
    assert found == [("1.1 before", False), ("", True)]


async def test_what_follows_a_request_that_closes_is_not_answered() -> None:
    async with listening(echo) as port, connected(port) as client:
        await client.send(post(b"1", b"Connection: close") + post(b"2"))
        head, body = await client.reply()
        assert (body, b"\r\nconnection: close\r\n" in head) == (b"POST /a False 1", True)
        assert await client.rest() == b""


async def test_a_broken_request_is_refused_behind_the_answers_before_it() -> None:
    async with listening(echo) as port, connected(port) as client:
        await client.send(post(b"1") + b"NONSENSE\r\n\r\n")
        assert (await client.reply())[1] == b"POST /a False 1"
        assert (await client.reply())[0].startswith(b"HTTP/1.1 400 ")
        assert await client.rest() == b""


async def test_a_broken_head_in_two_segments_is_not_taken_for_http2() -> None:
    request = post(b"{}", b"Transfer-Encoding: chunked")
    async with listening(echo) as port, connected(port) as client:
        await client.send(request[:40], request[40:])
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")


async def test_a_broken_body_ends_its_request_with_a_refusal() -> None:
    seen = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await body_of(receive)
        except ConnectionError:
            seen.set()

    async with listening(app) as port, connected(port) as client:
        await client.send(CHUNKED + b"\r\n", b"3\r\nabc", b"nonsense\r\n")
        assert (await client.reply())[0].startswith(b"HTTP/1.1 400 ")
        await asyncio.wait_for(seen.wait(), PATIENCE_SECONDS)


async def test_a_head_without_end_is_refused() -> None:
    async with listening(echo) as port, connected(port) as client:
        client.writer.write(b"POST /a HTTP/1.1\r\nHost: a\r\nx: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                await client.send(b"y" * 4096)
                if client.reader._buffer:  # type: ignore[attr-defined]
                    break
        assert (await client.reply())[0].startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("segments", [1, 3])
async def test_a_long_head_is_refused_though_its_end_comes_with_it(segments: int) -> None:
    head = b"GET /a HTTP/1.1\r\nHost: a\r\nx: %b\r\n\r\n"
    for surplus, status in ((-100, b"200"), (0, b"431")):
        data = head % (b"y" * (protocol.MAX_HEAD_BYTES + surplus))
        size = len(data) // segments + 1
        async with listening(echo) as port, connected(port) as client:
            await client.send(*(data[at : at + size] for at in range(0, len(data), size)))
            assert (await client.reply())[0].startswith(b"HTTP/1.1 %b " % status)


async def test_behind_a_long_head_in_a_pipeline_nothing_is_answered_and_before_it_all() -> None:
    head = b"GET /%b HTTP/1.1\r\nHost: a\r\nx: %b\r\n\r\n"
    async with listening(echo) as port, connected(port) as client:
        await client.send(
            head % (b"first", b"") + head % (b"long", b"y" * 65536) + head % (b"last", b"")
        )
        assert (await client.reply())[1] == b"GET /first False "
        assert (await client.reply())[0].startswith(b"HTTP/1.1 431 ")
        assert await asyncio.wait_for(client.reader.read(), PATIENCE_SECONDS) == b""


async def test_large_bodies_in_a_pipeline_do_not_count_as_heads() -> None:
    body = b"b" * 100_000
    async with listening(echo) as port, connected(port) as client:
        stream = post(body) * 4
        await client.send(stream[:150_000], stream[150_000:210_000], stream[210_000:])
        for _ in range(4):
            assert (await client.reply())[1] == b"POST /a False " + body


async def test_heads_that_come_before_their_bodies_do_not_add_up() -> None:
    """Clients that send head and body apart keep one connection for as long as they like."""
    begun = asyncio.Event()

    async def telling(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await echo(scope, receive, send)

    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nFiller: %b\r\n\r\n" % (b"x" * 4096)
    async with listening(telling) as port, connected(port) as client:
        for _ in range(2 * request_parser.MAX_HEAD_BYTES // len(head)):
            begun.clear()
            client.writer.write(head)
            await asyncio.wait_for(
                begun.wait(), PATIENCE_SECONDS
            )  # the head is a segment of its own
            client.writer.write(b"body")
            answer, body = await client.reply()
            assert (answer.startswith(OK), body) == (True, b"POST / False body")


async def test_continue_is_said_when_the_body_is_asked_for() -> None:
    head, body = post(b"body", b"Expect: 100-continue").split(b"\r\n\r\n")
    async with listening(echo) as port, connected(port) as client:
        await client.send(head + b"\r\n\r\n")
        assert (await client.reply())[0] == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(body)
        assert (await client.reply())[1] == b"POST /a False body"


async def test_a_refusal_without_reading_the_body_closes_the_connection() -> None:
    """Whether the client sends its body after all nobody can tell: the next bytes may be either."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, b"no", status=403)

    async with listening(refuse) as port, connected(port) as client:
        await client.send(post(b"body", b"Expect: 100-continue")[:-4])
        head, _ = await client.reply()
        assert head.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert b"\r\nconnection: close\r\n" in head


@CLEAR_TEXT
async def test_a_body_that_the_application_does_not_read_is_held_back() -> None:
    released, sizes = asyncio.Event(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        await released.wait()
        while True:
            sizes.append(len(message["body"]))
            if not message["more_body"]:
                break
            message = await receive()
        await reply(send, b"%d" % sum(sizes))

    size = 32 * 1024 * 1024
    async with listening(app) as port, connected(port) as client:
        client.writer.write(post(b"")[: -len(b"0\r\n\r\n")] + b"%d\r\n\r\n" % size)
        client.writer.write(bytes(size))
        with pytest.raises(TimeoutError):  # it is not taken
            await asyncio.wait_for(client.writer.drain(), 0.3)
        released.set()
        assert (await client.reply())[1] == b"%d" % size
    # Two reads of the transport past the mark.
    assert max(sizes) <= protocol.HIGH_WATER_BYTES + 2 * 256 * 1024


async def test_the_rest_of_a_body_that_was_answered_early_is_dropped() -> None:
    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/a":
            await reply(send, b"early")
        else:
            await echo(scope, receive, send)

    size = 4 * 1024 * 1024
    async with listening(early) as port, connected(port) as client:
        request = post(bytes(size))
        await client.send(request[:1000])
        assert (await client.reply())[1] == b"early"
        await client.send(request[1000:] + post(b"2").replace(b"/a", b"/b"))
        assert (await client.reply())[1] == b"POST /b False 2"


@pytest.mark.parametrize("url", [b"http://a/x%20y?q#f", b"/x%20y?q", b"/x%20y"])
async def test_every_form_of_a_target_has_its_path(url: bytes) -> None:
    found = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.update(scope)
        await reply(send, b"")

    async with listening(app) as port, connected(port) as client:
        await client.send(b"GET " + url + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.reply())[0].startswith(OK)
    assert (found["path"], found["raw_path"]) == ("/x y", b"/x%20y")
    assert found["query_string"] == (b"q" if b"?" in url else b"")


# -- answers --------------------------------------------------------------------------------------


async def streamed(scope: Scope, receive: Receive, send: Send) -> None:
    await body_of(receive)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"one", b"", b"two"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body"})


async def test_an_answer_without_a_length_is_chunked_and_the_connection_stays() -> None:
    async with listening(streamed) as port, connected(port) as client:
        for _ in range(2):
            await client.send(post(b""))
            head = await within(client.reader.readuntil(b"\r\n\r\n"))
            assert b"\r\ntransfer-encoding: chunked\r\n" in head
            end = await within(client.reader.readuntil(b"\r\n0\r\n\r\n"))
            assert end == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_to_http_1_0_an_answer_without_a_length_ends_with_the_connection() -> None:
    async with listening(streamed) as port, connected(port) as client:
        await client.send(post(b"", version=b"1.0"))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"\r\nconnection: close" in head
    assert body == b"onetwo"


async def test_the_head_of_a_stream_does_not_wait_for_its_first_part() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async with listening(app) as port, connected(port) as client:
        await client.send(post(b""))
        assert (await client.reply())[0].startswith(OK)


async def test_a_head_request_is_answered_without_the_body() -> None:
    async with listening(echo) as port, connected(port) as client:
        await client.send(b"HEAD /a HTTP/1.1\r\nHost: a\r\n\r\n" + post(b"2"))
        head = await within(client.reader.readuntil(b"\r\n\r\n"))
        assert b"\r\ncontent-length: 14\r\n" in head
        assert (await client.reply())[1] == b"POST /a False 2"


async def test_a_large_answer_arrives_whole_at_a_slow_reader() -> None:
    size = 16 * 1024 * 1024
    waited = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        length = (b"content-length", b"%d" % size)
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        for index in range(16):
            part = bytes([index]) * (size // 16)
            await send({"type": "http.response.body", "body": part, "more_body": index < 15})
        waited.set()

    async with listening(app) as port, connected(port) as client:
        await client.send(post(b""))
        await asyncio.sleep(0.1)  # the reader is slow
        assert not waited.is_set()
        _, body = await client.reply()
        assert body == b"".join(bytes([index]) * (size // 16) for index in range(16))


@pytest.mark.parametrize("parts", [1, 64])
async def test_a_reply_that_its_client_never_reads_is_given_up(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limits, "UNREAD_SECONDS", 0.1)
    aborted = asyncio.Event()
    check = unread_timer.UnreadTimer._check

    def watched(timer: unread_timer.UnreadTimer) -> None:
        check(timer)
        if timer._transport is None or timer._transport.is_closing():
            aborted.set()

    monkeypatch.setattr(unread_timer.UnreadTimer, "_check", watched)
    size = 64 << 20

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        length = (b"content-length", b"%d" % size)
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        for index in range(parts):
            part = bytes(size // parts)
            await send({"type": "http.response.body", "body": part, "more_body": index < parts - 1})

    async with listening(app) as port, connected(port) as client:
        await client.send(post(b""))
        await within(aborted.wait())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await within(client.reader.readexactly(size))


@pytest.mark.parametrize("reads", [3, 0])
async def test_a_reader_is_waited_for_as_long_as_it_reads_and_no_longer(
    reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for up to twice as long."""
    clock = 0.0
    left = [1000]

    class Transport:
        aborted = 0.0

        def abort(self) -> None:
            self.aborted = clock

    monkeypatch.setattr(unread_timer, "untaken_bytes", lambda _: left[0])
    loop, transport = asyncio.get_running_loop(), Transport()
    monkeypatch.setattr(loop, "time", lambda: clock, raising=False)
    timer = unread_timer.UnreadTimer(loop, PROCESS.connection())
    monkeypatch.setattr(unread_timer.UnreadTimer, "_watch", lambda _: None)
    timer.start(transport, clock)  # type: ignore[arg-type]
    while not transport.aborted:
        clock += time_limits.CHECK_SECONDS
        if reads:
            reads, left[0] = reads - 1, left[0] - 1
            last = clock
        timer._check()
    assert transport.aborted - (last if left[0] < 1000 else 0) == time_limits.UNREAD_SECONDS


@pytest.mark.parametrize("when", ["before", "amid"])
async def test_an_application_that_fails_is_distinguishable_from_an_answer(when: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if when == "amid":
            length = (b"content-length", b"8")
            await send({"type": "http.response.start", "status": 200, "headers": [length]})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("secret")

    async with listening(app) as port, connected(port) as client:
        await client.send(post(b""))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    if when == "before":
        assert head.startswith(b"HTTP/1.1 500 ")
        assert body == b'{"error":"internal error"}'
    else:
        assert (head.startswith(OK), body) == (True, b"half")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x", b"1\r\nset-cookie: 2"),
        (b"x", b"1\nset-cookie: 2"),
        (b"x", b"1\rset-cookie: 2"),
        (b"x", b"1\n\rset-cookie: 2"),
        (b"x: 1\r\nset-cookie", b"2"),
        (b"x", b"1\r\n\r\nset-cookie: 2"),
    ],
)
async def test_a_header_with_a_line_break_splits_no_answer(name: bytes, value: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, b"", (name, value))

    async with listening(app) as port, connected(port) as client:
        await client.send(post(b""))
        head, body = await client.reply()
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"set-cookie" not in head + body


@pytest.mark.parametrize("header", [b"Content-Encoding: gzip", b"CONTENT-ENCODING: Deflate"])
async def test_what_a_small_compressed_body_becomes_counts_in_the_budget(
    monkeypatch: pytest.MonkeyPatch, header: bytes
) -> None:
    monkeypatch.setattr(PROCESS, "limit_bytes", 2_000_000)
    held: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        before = PROCESS.used_bytes
        try:
            request_memory.reserve(500_000)
            request_memory.reserve(1_000_000)
        except MemoryExhausted:
            await reply(send, b"", status=503)
        else:
            await reply(send, b"")
        held.append(PROCESS.used_bytes - before)

    async with listening(app) as port, connected(port) as client:
        for headers, status in (((header,), b"503"), ((), b"503"), ((header,), b"503")):
            await client.send(post(b"small", *headers))
            head, _ = await client.reply()
            assert head.startswith(b"HTTP/1.1 " + status), "a connection may hold half"
    assert held == [500_000] * 3
    assert PROCESS.used_bytes == 0


async def test_idle_connections_shut_no_listener_of_few() -> None:
    async with listening(echo, most=4) as port, contextlib.AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(connected(port)) for _ in range(12)]
        await asyncio.sleep(0)
        client = await stack.enter_async_context(connected(port))
        await client.send(post(b"1"))
        assert (await client.reply())[0].startswith(b"HTTP/1.1 200")
        assert await idle[0].rest() == b"", "the oldest has made room"


# -- clients that go ------------------------------------------------------------------------------


def reset(writer: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


@pytest.mark.parametrize("goes", ["reset", "close"])
async def test_a_client_that_goes_cancels_its_request(goes: str) -> None:
    app = Stuck()
    async with listening(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"1"))
        await asyncio.wait_for(app.begun.wait(), PATIENCE_SECONDS)
        assert not app.cancelled.is_set()
        reset(writer) if goes == "reset" else writer.close()
        await asyncio.wait_for(app.cancelled.wait(), PATIENCE_SECONDS)


async def test_the_check_sees_a_request_that_outlives_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_cycle.RequestResponseCycle, "disconnect", lambda cycle: None)
    app = Stuck()
    async with listening(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"1"))
        await asyncio.wait_for(app.begun.wait(), PATIENCE_SECONDS)
        reset(writer)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(app.cancelled.wait(), 0.5)


@CLEAR_TEXT
async def test_a_client_that_only_ends_its_side_gets_its_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits, "PROBE_SECONDS", 0.01)

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(receive)
        await asyncio.sleep(0.2)  # many looks
        await reply(send, body)

    async with listening(slow) as port, connected(port) as client:
        await client.send(post(b"1") + post(b"2"))
        client.writer.write_eof()
        got = await client.rest()
    answers = got.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"", 1).split(OK)
    assert [answer[-1:] for answer in answers] == [b"", b"1", b"2"], got
    assert len(got) > sum(map(len, answers)) + 2 * len(OK), "it was not looked for"


async def test_an_application_that_reads_a_body_learns_that_the_client_left() -> None:
    told = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await body_of(receive)
        except ConnectionError:
            told.set()

    async with listening(app) as port:
        async with connected(port) as client:
            await client.send(post(b"12345")[:-2])
        await asyncio.wait_for(told.wait(), PATIENCE_SECONDS)


async def test_a_client_that_goes_ends_a_stream_that_has_nowhere_to_go() -> None:
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        finally:
            ended.set()

    async with listening(app) as port:
        async with connected(port) as client:
            await client.send(post(b""))
            await within(client.reader.readexactly(1))
        await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)


# -- limits ---------------------------------------------------------------------------------------


async def test_health_is_answered_when_connections_are_exhausted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening_socket, "MAX_CONNECTIONS", 1)
    listener = HttpListener(echo, bind("127.0.0.1", 0, "--http-port"), health=[b"/ready"])
    await listener.start()
    async with connected(listener.port) as first, connected(listener.port) as second:
        await first.send(post(b"1"))
        assert (await first.reply())[0].startswith(OK)
        await second.send(b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n")
        head, _ = await second.reply()
        assert head.startswith(OK)
        assert b"connection: close" in head
    await listener.drain(Deadline.after(0))


def test_the_number_of_a_file_tells_how_many_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has opened them: the reserve is the process's, and not of each listener."""
    monkeypatch.setattr(listening_socket.resource, "getrlimit", lambda _: (1024, 1024))
    limit = listening_socket.ConnectionLimit()
    rooms = [limit.room(10, number) for number in (700, 767, 768, 831, 832)]
    free, health, none = listening_socket.Room
    assert rooms == [free, free, health, health, none]
    assert listening_socket.ConnectionLimit(64).room(10, 1000) is free


#: What is sent behind a head that announces chunks, without an end.
ENDLESS = {
    "trailers": b"0\r\n" + b"x-trailer: y\r\n" * 20_000,
    "one trailer": b"0\r\nx: " + b"y" * 200_000,
    "an extension": b"1;" + b"x" * 200_000,
    "empty trailers": b"0\r\n" + b"x:\r\n" * 40_000,
}
CHUNKED_HEAD = b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_follows_the_chunks_without_end_is_refused(what: str) -> None:
    async with listening(echo) as port, connected(port) as client:
        await client.send(CHUNKED_HEAD + b"1\r\na\r\n" + ENDLESS[what])
        assert (await client.reply())[0].startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("what", ENDLESS)
async def test_without_its_bound_it_is_taken_on_and_on(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known-bad variant."""
    monkeypatch.setattr(protocol, "MAX_HEAD_BYTES", 10**9)
    monkeypatch.setattr(time_limits, "BODY_IDLE_SECONDS", 0.3)
    async with listening(echo) as port, connected(port) as client:
        await client.send(CHUNKED_HEAD + b"1\r\na\r\n" + ENDLESS[what])
        assert (await client.reply())[0].startswith(b"HTTP/1.1 408 ")


async def test_headers_without_number_are_refused() -> None:
    async with listening(echo) as port, connected(port) as client:
        await client.send(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 1001 + b"\r\n")
        assert (await client.reply())[0].startswith(b"HTTP/1.1 431 ")


async def test_pieces_of_a_body_count_for_what_they_hold() -> None:
    """A byte in each chunk: its objects are larger than it is, and reading stops for them."""
    release = asyncio.Event()
    held: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await release.wait()
        await reply(send, str(len(await body_of(receive))).encode())

    async with listening(app) as port, connected(port) as client:
        content = b"2\r\nab\r\n" * 100_000
        sending = asyncio.ensure_future(client.send(CHUNKED_HEAD + content + b"0\r\n\r\n"))
        while not PROCESS.used_bytes:
            await asyncio.sleep(0)
        for _ in range(100):
            held.append(PROCESS.used_bytes)
            await asyncio.sleep(0)
        assert max(held) < 2 * protocol.HIGH_WATER_BYTES
        release.set()
        assert (await client.reply())[1] == b"200000"
        await sending
        assert PROCESS.used_bytes == 0


async def test_bodies_that_never_end_hold_no_more_than_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROCESS, "limit_bytes", 500_000)
    length = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(listening(echo))
        clients = [await stack.enter_async_context(connected(port)) for _ in range(6)]
        for client in clients:
            await client.send(length + bytes(150_000))
        heads = [(await client.reply())[0] for client in clients[3:]]
        assert all(head.startswith(b"HTTP/1.1 503 ") for head in heads)
        assert all(b"retry-after: 1" in head for head in heads)
        assert PROCESS.used_bytes <= 500_000
    assert PROCESS.used_bytes == 0


async def test_a_request_cancelled_before_its_application_starts_gets_an_error() -> None:
    stuck = Stuck()
    listener = HttpListener(stuck, bind("127.0.0.1", 0, "--http-port"))
    await listener.start()
    async with connected(listener.port) as client:
        await client.send(post(b""))
        while not listener.state.requests:
            await asyncio.sleep(0)
        (cycle,) = listener.state.requests
        cycle.cancel()
        assert (await client.reply())[0].startswith(b"HTTP/1.1 503 ")
    await listener.drain(Deadline.after(0))


@CLEAR_TEXT
async def test_a_request_on_one_connection_too_many_gets_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening_socket, "MAX_CONNECTIONS", 2)
    async with listening(echo) as port, connected(port) as first, connected(port) as second:
        for client in (first, second):
            await client.send(post(b"1"))
            assert (await client.reply())[0].startswith(OK)
        for most, sent in ((64, post(b"3")), (0, b"")):  # with room for questions about health
            monkeypatch.setattr(listening_socket, "HEALTH_CONNECTIONS", most)
            async with connected(port) as third:
                await third.send(sent)
                head, body = await third.reply()
                assert head.startswith(b"HTTP/1.1 503 ")
                assert body == b'{"error":"too many connections"}'
        await first.send(post(b"2"))
        assert (await first.reply())[0].startswith(OK)
        second.writer.close()
        await second.writer.wait_closed()
        async with connected(port) as fourth:
            await fourth.send(post(b"4"))
            assert (await fourth.reply())[0].startswith(OK)


async def test_a_connection_that_does_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "KEEP_ALIVE_SECONDS", 0.2)
    monkeypatch.setattr(time_limits, "HEAD_SECONDS", 0.4)
    async with listening(echo) as port, connected(port) as client, connected(port) as silent:
        for _ in range(3):
            await client.send(post(b"1"))
            assert (await client.reply())[0].startswith(OK)
        assert await client.rest() == b""
        assert (await silent.reply())[0].startswith(b"HTTP/1.1 408 ")


async def test_a_head_that_comes_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "HEAD_SECONDS", 0.2)
    async with listening(echo) as port, connected(port) as client:
        await client.send(post(b"1"))
        assert (await client.reply())[0].startswith(OK)
        with contextlib.suppress(ConnectionResetError):  # over TLS, the client sees the end earlier
            await client.send(*[bytes([byte]) for byte in post(b"2")[:20]])
        assert (await client.reply())[0].startswith(b"HTTP/1.1 408 ")


async def test_on_shutdown_requests_in_flight_are_answered_and_connections_closed() -> None:
    begun, released = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await released.wait()
        await reply(send, b"late")

    listener = HttpListener(app, bind("127.0.0.1", 0, "--http-port"))
    await listener.start()
    async with connected(listener.port) as client, connected(listener.port) as idle:
        await client.send(post(b""))
        await begun.wait()
        draining = asyncio.ensure_future(listener.drain(Deadline.after(PATIENCE_SECONDS)))
        asyncio.get_running_loop().call_later(0.5, released.set)
        head, body = await client.reply()
        assert (body, b"\r\nconnection: close\r\n" in head) == (b"late", True)
        assert await idle.rest() == b""
        await draining


@pytest.mark.parametrize("seconds", [NEWCOMER_SECONDS, 0.0], ids=["", "known-bad: none"])
async def test_on_shutdown_a_new_connection_gets_an_answer_to_its_first_request(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client was slow, for example on a busy machine, and does not expect an end."""
    monkeypatch.setattr(listener_module, "NEWCOMER_SECONDS", seconds)
    monkeypatch.setattr(listener_module, "QUIET_SECONDS", 0.05)
    listener = HttpListener(echo, bind("127.0.0.1", 0, "--http-port"))
    await listener.start()
    async with connected(listener.port) as client:
        await until(lambda: bool(listener.state.connections))
        draining = asyncio.ensure_future(listener.drain(Deadline.after(PATIENCE_SECONDS)))
        await asyncio.wait({draining}, timeout=0.3)  # the pace of the client, which is tested
        assert draining.done() is (not seconds)
        if seconds:
            await client.send(post(b"x"))
            head, _ = await client.reply()
            assert (head[:12], b"connection: close" in head) == (b"HTTP/1.1 200", True)
        assert await client.rest() == b""
        await draining


async def test_a_request_that_outlasts_the_end_is_answered_503() -> None:
    app = Stuck()
    listener = HttpListener(app, bind("127.0.0.1", 0, "--http-port"))
    await listener.start()
    async with connected(listener.port) as client:
        await client.send(post(b""))
        await app.begun.wait()
        await listener.drain(Deadline.after(0.1))
        assert (await client.reply())[0].startswith(b"HTTP/1.1 503 ")
