"""The HTTP/1.1 listener: one connection, byte for byte, against small handlers."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import socket
import struct
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any

import pytest
import structlog

from modelport.gateway.access import context as access_context
from modelport.gateway.errors import MemoryExhausted
from modelport.gateway.protocols.http_message import (
    Answer,
    ClientDisconnected,
    Handler,
    HttpRequest,
    HttpResponse,
)
from modelport.gateway.rollout.traffic import request_routing
from modelport.gateway.runtime import request_memory
from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.server import listener as listener_module
from modelport.gateway.server import listening_socket, time_limits
from modelport.gateway.server.http1 import connection, exchange, unread_timer
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.http1.read_buffer import HIGH_WATER_BYTES
from modelport.gateway.server.listening_socket import NEWCOMER_SECONDS, bind
from modelport.gateway.types import Deadline
from modelport.gateway.wire import via_header
from tests.gateway.server.handlers import body_of, echo, on_body
from tests.polling import until

pytestmark = pytest.mark.usefixtures("transport")
#: The client of the test decides: it is not asyncio's, or TLS has no word for what it does.
CLEAR_TEXT = pytest.mark.parametrize("transport", ["clear text"], indirect=True)

PATIENCE_SECONDS = 60.0
OK = b"HTTP/1.1 200 OK"


def breaking(when: str) -> Handler:
    """Make a handler with a defect: at once, before its response, or amid it."""

    async def parts() -> AsyncGenerator[bytes, None]:
        yield b"half"
        raise ValueError("secret")

    async def before(request: HttpRequest) -> HttpResponse:
        await body_of(request)
        raise ValueError("secret")

    def handle(request: HttpRequest) -> Answer:
        if when == "at once":
            raise ValueError("secret")
        return before(request) if when == "before" else HttpResponse(200, parts=parts())

    return handle


class Stuck:
    """A handler that never answers; what became of it."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        await body_of(request)
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError


@contextlib.asynccontextmanager
async def listening(handler: Handler, **options: Any) -> AsyncIterator[int]:
    listener = HttpListener(handler, bind("127.0.0.1", 0, "--http-port"), **options)
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

    async def stream(self) -> bytes:
        """The body of a chunked response, whose head was read."""
        body = b""
        while size := int(await within(self.reader.readuntil(b"\r\n")), 16):
            body += (await within(self.reader.readexactly(size + 2)))[:-2]
        await within(self.reader.readexactly(2))
        return body

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

    async def slow_first(request: HttpRequest) -> HttpResponse:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        body = await body_of(request)
        await asyncio.sleep(0.05 if body == b"0" else 0)
        under_way -= 1
        return HttpResponse(200, body)

    async with listening(slow_first) as port, connected(port) as client:
        await client.send(b"".join(post(b"%d" % n) for n in range(50)))
        assert [(await client.reply())[1] for _ in range(50)] == [b"%d" % n for n in range(50)]
    assert most == 1


async def test_a_pipelined_request_has_nothing_of_the_request_before_it() -> None:
    found: list[tuple[str, bool]] = []

    def look(request: HttpRequest) -> Answer:
        lease = request_memory.CURRENT.get()
        found.append((via_header.CURRENT.get(), lease is None or not lease.size))
        return echo(request)

    large = b"x" * (2 * exchange.UNCOUNTED_BYTES)
    async with listening(look) as port, connected(port) as client:
        await client.send(post(large, b"via: 1.1 before") + post(b"small"))
        for body in (large, b"small"):
            assert (await client.reply())[1].endswith(body)
    assert found == [("1.1 before", False), ("", True)]


@pytest.mark.parametrize("recursive", [False, True], ids=["", "known-bad: recursive"])
async def test_other_connections_get_their_turn_between_the_requests_of_a_pipeline(
    recursive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler does not wait: it is called by the event loop, not by the request before."""
    paths, depths, count = list[str](), list[int](), 50

    def note(request: HttpRequest) -> HttpResponse:
        paths.append(request.path)
        depths.append(sum(1 for _ in traceback.walk_stack(None)))
        return HttpResponse(200, request.path.encode())

    if recursive:
        complete = connection.HttpConnection.response_complete

        def complete_and_start(self: connection.HttpConnection, of: exchange.Exchange) -> None:
            complete(self, of)
            self._start_next()

        monkeypatch.setattr(connection.HttpConnection, "response_complete", complete_and_start)
    async with listening(note) as port, connected(port) as many, connected(port) as one:
        get = b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n"
        many.writer.write(b"".join(get % b"%d" % number for number in range(count)))
        one.writer.write(get % b"one")
        replies = [(await many.reply())[1] for _ in range(count)]
        assert (await one.reply())[1] == b"/one"
    assert replies == [b"/%d" % number for number in range(count)]
    assert (max(depths) - min(depths) > count) is recursive
    assert recursive or paths.index("/one") < count // 2


class ContextProbe:
    """A handler that finds the values of context variables, and sets others."""

    variables: tuple[contextvars.ContextVar[Any], ...] = (
        via_header.CURRENT, access_context.CURRENT, request_routing.CURRENT, request_memory.CURRENT,
    )  # fmt: skip

    def __init__(self) -> None:
        self.defaults = self._values()
        self.found = list[list[object]]()

    def __call__(self, request: HttpRequest) -> Answer:
        self.found.append(self._values())
        for variable in self.variables:
            variable.set(request.path)
        return echo(request)

    def _values(self) -> list[object]:
        return [variable.get() for variable in self.variables]

    def check(self, requests: int) -> None:
        """Assert that each request has a lease of its own, and nothing of any other."""
        assert [seen[:-1] for seen in self.found] == [self.defaults[:-1]] * requests
        assert all(isinstance(seen[-1], request_memory.Lease) for seen in self.found)
        assert len({id(seen[-1]) for seen in self.found}) == requests
        assert self._values() == self.defaults


async def test_requests_of_a_connection_share_no_context_variables() -> None:
    probe, late = ContextProbe(), CHUNKED + b"\r\n"
    async with listening(probe) as port, connected(port) as client:
        await client.send(post(b"1") * 2 + late, CHUNKS + late, CHUNKS + post(b"2"))
        for _ in range(5):
            assert (await client.reply())[0].startswith(OK)
    probe.check(requests=5)


async def test_a_head_that_repeats_is_that_of_its_own_request() -> None:
    """The fields of one request, which its handler may change, are not those of the next."""
    found = list[list[bytes]]()

    @on_body
    def note(request: HttpRequest, body: bytes) -> HttpResponse:
        found.append([value for name, value in request.headers if name == b"x-api-key"])
        request.headers.append((b"x-api-key", b"added by the handler"))
        return HttpResponse(200, body)

    keys = [b"a", b"a", b"a", b"b", b"a"]
    async with listening(note) as port, connected(port) as client:
        for number, key in enumerate(keys):
            await client.send(post(b"%d" % number, b"X-Api-Key: " + key))
            assert (await client.reply())[1] == b"%d" % number
    assert found == [[key] for key in keys]


async def test_a_request_for_which_there_is_no_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = post(bytes(4 * exchange.UNCOUNTED_BYTES))
    async with listening(echo) as port, connected(port) as client:
        for limit, status in ((PROCESS.limit_bytes, b"200"), (0, b"503")):
            monkeypatch.setattr(PROCESS, "limit_bytes", limit)
            await client.send(request)
            assert (await client.reply())[0].startswith(b"HTTP/1.1 " + status)
        assert await client.rest() == b""
    assert PROCESS.used_bytes == 0


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


@pytest.mark.parametrize(
    ("count", "size", "status"), [(8, 1, 200), (9, 1, 400), (90, 1, 400), (90, 16, 200)]
)
async def test_chunks_beyond_the_limit_are_refused_if_they_are_small(
    count: int, size: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_CHUNKS", 8)
    monkeypatch.setattr(connection, "CHUNK_BYTES", 16)
    chunk = b"%x\r\n%b\r\n" % (size, b"a" * size)
    request = CHUNKED + b"\r\n" + chunk * count + b"0\r\n\r\n"
    async with listening(echo) as port, connected(port) as client:
        for _ in range(2 if status == 200 else 1):  # the next body has a count of its own
            await client.send(request[:70], request[70:])
            head, body = await client.reply()
            assert head.startswith(b"HTTP/1.1 %d " % status)
        assert status == 200 or b"Send fewer or larger HTTP chunks" in body


async def test_a_broken_body_ends_its_request_with_a_refusal() -> None:
    seen = asyncio.Event()

    async def app(request: HttpRequest) -> HttpResponse:
        try:
            await body_of(request)
        except ClientDisconnected:
            seen.set()
            raise
        raise AssertionError

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
        data = head % (b"y" * (connection.MAX_HEAD_BYTES + surplus))
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


@pytest.mark.parametrize("seed", range(8))
async def test_bodies_of_any_size_cut_anywhere_are_those_that_were_sent(seed: int) -> None:
    """The parser sees a body of known length only as far as its first segment has it."""
    draw = random.Random(seed)
    bodies = [draw.randbytes(draw.choice((0, 1, 7, 5_000, 70_000, 300_000))) for _ in range(12)]
    stream = b"".join(
        CHUNKED + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        if body and draw.random() < 0.3
        else post(body, *draw.choice(((), OFFER)))
        for body in bodies
    )
    async with listening(echo) as port, connected(port) as client:

        async def send() -> None:
            left = stream
            while left:
                size = draw.choice((1, 2, 30, 60, 90, 1000, 40_000, 200_000))
                client.writer.write(left[:size])
                left = left[size:]
                await client.writer.drain()
                for _ in range(draw.randrange(4)):
                    await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        for body in bodies:
            assert (await client.reply())[1] == b"POST /a False " + body
        await sending


async def test_heads_that_come_before_their_bodies_do_not_add_up() -> None:
    """Clients that send head and body apart keep one connection for as long as they like."""
    begun = asyncio.Event()

    def telling(request: HttpRequest) -> Answer:
        begun.set()
        return echo(request)

    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nFiller: %b\r\n\r\n" % (b"x" * 4096)
    async with listening(telling) as port, connected(port) as client:
        for _ in range(2 * connection.MAX_HEAD_BYTES // len(head)):
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

    def refuse(request: HttpRequest) -> HttpResponse:
        return HttpResponse(403, b"no")

    async with listening(refuse) as port, connected(port) as client:
        await client.send(post(b"body", b"Expect: 100-continue")[:-4])
        head, _ = await client.reply()
        assert head.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert b"\r\nconnection: close\r\n" in head


@CLEAR_TEXT
async def test_a_body_that_the_handler_does_not_read_is_held_back() -> None:
    released = asyncio.Event()

    async def app(request: HttpRequest) -> HttpResponse:
        await released.wait()
        return HttpResponse(200, b"%d" % len(await body_of(request)))

    size = 32 * 1024 * 1024
    async with listening(app) as port, connected(port) as client:
        client.writer.write(post(b"")[: -len(b"0\r\n\r\n")] + b"%d\r\n\r\n" % size)
        client.writer.write(bytes(size))
        with pytest.raises(TimeoutError):  # it is not taken
            await asyncio.wait_for(client.writer.drain(), 0.3)
        released.set()
        assert (await client.reply())[1] == b"%d" % size


async def test_the_rest_of_a_body_that_was_answered_early_is_dropped() -> None:
    def early(request: HttpRequest) -> Answer:
        return HttpResponse(200, b"early") if request.path == "/a" else echo(request)

    size = 4 * 1024 * 1024
    async with listening(early) as port, connected(port) as client:
        request = post(bytes(size))
        await client.send(request[:1000])
        assert (await client.reply())[1] == b"early"
        await client.send(request[1000:] + post(b"2").replace(b"/a", b"/b"))
        assert (await client.reply())[1] == b"POST /b False 2"


@pytest.mark.parametrize("url", [b"http://a/x%20y?q#f", b"/x%20y?q", b"/x%20y"])
async def test_every_form_of_a_target_has_its_path(url: bytes) -> None:
    found = list[HttpRequest]()

    def app(request: HttpRequest) -> HttpResponse:
        found.append(request)
        return HttpResponse(200)

    async with listening(app) as port, connected(port) as client:
        await client.send(b"GET " + url + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.reply())[0].startswith(OK)
    assert (found[0].path, found[0].raw_path) == ("/x y", b"/x%20y")
    assert found[0].query == (b"q" if b"?" in url else b"")


# -- answers --------------------------------------------------------------------------------------


@on_body
def streamed(request: HttpRequest, body: bytes) -> HttpResponse:
    async def parts() -> AsyncGenerator[bytes, None]:
        for part in (b"", b"two"):
            yield part

    return HttpResponse(200, b"one", parts=parts())


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
    async def parts() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    async with (
        listening(lambda request: HttpResponse(200, parts=parts())) as port,
        connected(port) as client,
    ):
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

    async def parts() -> AsyncGenerator[bytes, None]:
        for index in range(16):
            yield bytes([index]) * (size // 16)
        waited.set()

    async with (
        listening(lambda request: HttpResponse(200, parts=parts())) as port,
        connected(port) as client,
    ):
        await client.send(post(b""))
        await asyncio.sleep(0.1)  # the reader is slow
        assert not waited.is_set()
        await client.reply()
        assert await client.stream() == b"".join(
            bytes([index]) * (size // 16) for index in range(16)
        )


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

    async def made() -> AsyncGenerator[bytes, None]:
        for _ in range(parts):
            yield bytes(size // parts)

    def app(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, parts=made()) if parts > 1 else HttpResponse(200, bytes(size))

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


@pytest.mark.parametrize("when", ["at once", "before", "amid"])
async def test_a_handler_that_fails_is_distinguishable_from_an_answer(when: str) -> None:
    with structlog.testing.capture_logs() as logs:
        async with listening(breaking(when)) as port, connected(port) as client:
            await client.send(post(b""))
            head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    if when == "amid":
        assert (head.startswith(OK), body) == (True, b"4\r\nhalf\r\n")
    else:
        assert head.startswith(b"HTTP/1.1 500 ")
        assert body == b'{"error":"internal error"}'
    assert [(log["event"], log["log_level"]) for log in logs] == [("request failed", "error")]


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
    headers = [(name, value)]
    async with (
        listening(lambda request: HttpResponse(200, b"", headers)) as port,
        connected(port) as client,
    ):
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

    @on_body
    def app(request: HttpRequest, body: bytes) -> HttpResponse:
        before, status = PROCESS.used_bytes, 200
        try:
            request_memory.reserve(500_000)
            request_memory.reserve(1_000_000)
        except MemoryExhausted:
            status = 503
        held.append(PROCESS.used_bytes - before)
        return HttpResponse(status)

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
    monkeypatch.setattr(exchange.Exchange, "disconnect", lambda self: None)
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

    async def slow(request: HttpRequest) -> HttpResponse:
        body = await body_of(request)
        await asyncio.sleep(0.2)  # many looks
        return HttpResponse(200, body)

    async with listening(slow) as port, connected(port) as client:
        await client.send(post(b"1") + post(b"2"))
        client.writer.write_eof()
        got = await client.rest()
    answers = got.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"", 1).split(OK)
    assert [answer[-1:] for answer in answers] == [b"", b"1", b"2"], got
    assert len(got) > sum(map(len, answers)) + 2 * len(OK), "it was not looked for"


async def test_a_handler_that_reads_a_body_learns_that_the_client_left() -> None:
    told = asyncio.Event()

    async def app(request: HttpRequest) -> HttpResponse:
        try:
            await body_of(request)
        except ClientDisconnected:
            told.set()
            raise
        raise AssertionError

    async with listening(app) as port:
        async with connected(port) as client:
            await client.send(post(b"12345")[:-2])
        await asyncio.wait_for(told.wait(), PATIENCE_SECONDS)


class EndlessStream:
    """A handler of a response without end, which waits for the client or for nothing."""

    def __init__(self, waits: bool) -> None:
        self.waits = waits
        self.ended = asyncio.Event()

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, parts=self._parts())

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"x" * 65536
                if self.waits:
                    await asyncio.Event().wait()
        finally:
            self.ended.set()


@pytest.mark.parametrize("waits", [False, True])
async def test_a_client_that_goes_ends_a_stream(waits: bool) -> None:
    stream = EndlessStream(waits)
    async with listening(stream) as port:
        async with connected(port) as client:
            await client.send(post(b""))
            await within(client.reader.readexactly(1))
            assert not stream.ended.is_set()
            reset(client.writer)  # a client that ends its side may still read
        await asyncio.wait_for(stream.ended.wait(), PATIENCE_SECONDS)


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
    monkeypatch.setattr(connection, "MAX_HEAD_BYTES", 10**9)
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

    async def app(request: HttpRequest) -> HttpResponse:
        await release.wait()
        return HttpResponse(200, b"%d" % len(await body_of(request)))

    async with listening(app) as port, connected(port) as client:
        content = b"2\r\nab\r\n" * 60_000
        sending = asyncio.ensure_future(client.send(CHUNKED_HEAD + content + b"0\r\n\r\n"))
        while not PROCESS.used_bytes:
            await asyncio.sleep(0)
        for _ in range(100):
            held.append(PROCESS.used_bytes)
            await asyncio.sleep(0)
        assert max(held) < 2 * HIGH_WATER_BYTES
        release.set()
        assert (await client.reply())[1] == b"120000"
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


async def test_a_request_cancelled_before_its_first_step_gets_an_error() -> None:
    stuck = Stuck()
    listener = HttpListener(stuck, bind("127.0.0.1", 0, "--http-port"))
    await listener.start()
    async with connected(listener.port) as client:
        await client.send(post(b""))
        while not listener.state.requests:
            await asyncio.sleep(0)
        (request,) = listener.state.requests
        request.cancel()
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


HALF_BODY = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
#: What the clients send, and whether this is the known-bad variant: only idle ones are replaced.
SLOW_CLIENTS = {
    "idle": (b"", False),
    "half a head": (b"GET / HTTP/1.1\r\nHos", False),
    "half a body": (HALF_BODY, False),
    "half a body, answered": (HALF_BODY.replace(b"/", b"/answered", 1), False),
    "known-bad": (HALF_BODY, True),
}


@CLEAR_TEXT
@pytest.mark.parametrize("slow", SLOW_CLIENTS)
async def test_clients_that_are_slow_do_not_fill_a_listener_with_few_connections(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 of them, with half a head or half a body, shut the metrics port."""
    sent, known_bad = SLOW_CLIENTS[slow]
    if known_bad:
        monkeypatch.setattr(connection.HttpConnection, "waiting", False)

    def answer(request: HttpRequest) -> Answer:
        return HttpResponse(404, b"") if request.path == "/answered" else echo(request)

    listener = HttpListener(answer, bind("127.0.0.1", 0, "--metrics-port"), most=2)
    await listener.start()
    async with connected(listener.port) as busy, connected(listener.port) as client:
        for each in (busy, client):
            await each.send(sent)
        await until(lambda: len(listener.state.connections) == 2)
        for _ in range(3):
            async with connected(listener.port) as other:
                await other.send(post(b"x"))
                head, _ = await other.reply()
                assert head.startswith(b"HTTP/1.1 503 " if known_bad else OK)
    await listener.drain(Deadline.after(0))


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

    async def app(request: HttpRequest) -> HttpResponse:
        begun.set()
        await released.wait()
        return HttpResponse(200, b"late")

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
