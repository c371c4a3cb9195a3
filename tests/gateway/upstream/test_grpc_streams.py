"""Several replies to one gRPC call, from a server that is written frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from modelport.gateway.errors import InvalidArgument, TimedOut
from modelport.gateway.types import Deadline
from modelport.gateway.upstream import grpc as upstream
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire.http2.frames import (
    ACK,
    DATA,
    END_STREAM,
    INITIAL_WINDOW_SIZE,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
)
from modelport.gateway.wire.http2.settings import STREAM_WINDOW_BYTES
from tests.gateway.upstream.http2_peer import (
    MESSAGE,
    OK,
    TRAILERS,
    Http2Peer,
    Script,
    ask,
    frame,
    prefixed,
    serving,
)

PIECE = 16_384


async def asked(peer: Http2Peer) -> int:
    await peer.greet()
    _, _, stream, _ = await peer.until(DATA, END_STREAM)
    return stream


def data(stream: int, content: bytes) -> bytes:
    pieces = range(0, len(content), PIECE)
    return b"".join(frame(DATA, 0, stream, content[at : at + PIECE]) for at in pieces)


@contextlib.asynccontextmanager
async def calling(script: Script, **keys: object) -> AsyncIterator[AsyncGenerator[bytes, None]]:
    """The replies of a server that does what ``script`` says."""
    async with serving(script, window=STREAM_WINDOW_BYTES, **keys) as channel:
        async with asyncio.timeout(30):
            call = channel.method("/a.B/C")
            async with aclosing(upstream.replies(call, b"x", bytes, Deadline.after(60))) as found:
                yield found


async def replies(script: Script, **keys: object) -> list[bytes]:
    async with calling(script, **keys) as found:
        return [message async for message in found]


async def test_messages_come_however_they_are_cut() -> None:
    async def script(peer: Http2Peer) -> None:
        stream = await asked(peer)
        content = prefixed(b"one") + prefixed(b"") + prefixed(b"three")
        peer.send(peer.headers(stream, OK))
        for byte in content:
            peer.send(frame(DATA, 0, stream, bytes((byte,))))
        peer.send(peer.headers(stream, TRAILERS, END_STREAM))

    assert await replies(script) == [b"one", b"", b"three"]


async def test_a_message_may_be_larger_than_the_window() -> None:
    large = bytes(3 * STREAM_WINDOW_BYTES)

    async def script(peer: Http2Peer) -> None:
        stream = await asked(peer)
        settings = next(f for f in peer.seen if f[0] == SETTINGS)[3]
        assert struct.pack(">HI", INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES) in settings
        peer.send(peer.headers(stream, OK))
        content, window = prefixed(large), STREAM_WINDOW_BYTES
        while content:
            sent, content = content[:window], content[window:]
            peer.send(data(stream, sent))
            window -= len(sent)
            while content and not window:
                _, _, widened, size = await peer.until(WINDOW_UPDATE)
                window += int.from_bytes(size) if widened == stream else 0
        peer.send(peer.headers(stream, TRAILERS, END_STREAM))

    assert await replies(script) == [large]


async def test_a_slow_caller_opens_no_window() -> None:
    """Until it asks for more than has come."""
    message = bytes(PIECE)
    count = STREAM_WINDOW_BYTES // len(prefixed(message))
    taken, arrived, opened = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def script(peer: Http2Peer) -> None:
        stream = await asked(peer)
        peer.send(peer.headers(stream, OK) + data(stream, prefixed(message)))
        await taken.wait()
        peer.send(data(stream, (count - 1) * prefixed(message)) + frame(PING, 0, 0, bytes(8)))
        await peer.until(PING, ACK)
        assert all(kind != WINDOW_UPDATE or not number for kind, _, number, _ in peer.seen)
        arrived.set()
        while (await peer.until(WINDOW_UPDATE))[2] != stream:
            pass
        opened.set()
        peer.send(peer.headers(stream, TRAILERS, END_STREAM))

    async with calling(script) as found:
        await anext(found)
        taken.set()
        await arrived.wait()
        for _ in range(count - 1):
            await anext(found)
        assert not opened.is_set()
        assert await anext(found, None) is None
        assert opened.is_set()


@pytest.mark.parametrize(
    ("content", "failure", "said"),
    [
        (struct.pack(">BI", 0, 101), FailureKind.DAMAGED, "larger than the route's max_reply"),
        (prefixed(bytes(101)), FailureKind.DAMAGED, "larger than the route's max_reply_bytes"),
        (b"\1" + prefixed(b"x")[1:], FailureKind.DAMAGED, "one uncompressed message"),
        (prefixed(b"x")[:3], FailureKind.DAMAGED, "it is truncated"),
        (prefixed(b"x")[:-1], FailureKind.DAMAGED, "one uncompressed message"),
    ],
)
async def test_a_damaged_message_ends_the_stream(
    content: bytes, failure: FailureKind, said: str
) -> None:
    async def script(peer: Http2Peer) -> None:
        stream = await asked(peer)
        peer.send(peer.headers(stream, OK) + data(stream, content))
        peer.send(peer.headers(stream, TRAILERS, END_STREAM))

    with pytest.raises(EndpointFailed, match=said) as caught:
        await replies(script, max_reply_bytes=100)
    assert caught.value.failure is failure


async def test_a_status_after_messages_is_the_servers_error() -> None:
    async def script(peer: Http2Peer) -> None:
        stream = await asked(peer)
        peer.send(peer.headers(stream, OK) + data(stream, prefixed(b"x")))
        status = [("grpc-status", "3"), ("grpc-message", "too%20long")]
        peer.send(peer.headers(stream, status, END_STREAM))

    with pytest.raises(InvalidArgument, match="too long"):
        await replies(script)


@pytest.mark.parametrize("body", [b"no", b"<html>" + bytes(100)])
async def test_another_answer_is_no_grpc(body: bytes) -> None:
    async def script(peer: Http2Peer) -> None:
        stream = await asked(peer)
        peer.send(peer.headers(stream, [(":status", "404"), ("content-type", "text/html")]))
        peer.send(frame(DATA, END_STREAM, stream, body))

    with pytest.raises(EndpointFailed, match="it does not speak gRPC"):
        await replies(script)


async def test_what_came_before_a_reset_is_taken_first() -> None:
    async def script(peer: Http2Peer) -> None:
        stream = await asked(peer)
        peer.send(peer.headers(stream, OK) + data(stream, 2 * prefixed(b"x")))
        peer.send(frame(RST_STREAM, 0, stream, struct.pack(">I", 2)))

    async with calling(script) as found:
        assert [await anext(found), await anext(found)] == [b"x", b"x"]
        with pytest.raises(EndpointFailed) as caught:
            await anext(found)
    assert caught.value.failure is FailureKind.DROPPED


async def test_a_reset_after_the_deadline_is_for_the_deadline() -> None:
    """A slow caller asks only then; servers reset a stream whose ``grpc-timeout`` is over."""
    limit, go_on, reset = Deadline.after(60), asyncio.Event(), asyncio.Event()

    async def script(peer: Http2Peer) -> None:
        stream = await asked(peer)
        peer.send(peer.headers(stream, OK) + data(stream, prefixed(b"x")))
        await go_on.wait()
        peer.send(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)) + frame(PING, 0, 0, bytes(8)))
        await peer.until(PING, ACK)
        reset.set()

    async with serving(script, window=STREAM_WINDOW_BYTES) as channel, asyncio.timeout(30):
        found = upstream.replies(channel.method("/a.B/C"), b"x", bytes, limit)
        assert await anext(found) == b"x"
        limit.at = 0.0
        go_on.set()
        await reset.wait()
        with pytest.raises(TimedOut):
            await anext(found)


async def test_a_stream_on_a_connection_that_was_left_ends_with_its_channel() -> None:
    connections = 0

    async def script(peer: Http2Peer) -> None:
        nonlocal connections
        connections += 1
        stream = await asked(peer)
        if connections == 1:
            peer.send(peer.headers(stream, OK) + data(stream, prefixed(b"x")))
        else:
            peer.send(peer.reply(stream))

    async with serving(script, window=STREAM_WINDOW_BYTES) as channel, asyncio.timeout(30):
        call = channel.method("/a.B/C")
        async with aclosing(upstream.replies(call, b"x", bytes, Deadline.after(60))) as found:
            assert await anext(found) == b"x"
            channel.reset()
            assert await ask(channel) == MESSAGE
            await channel.close()
            with pytest.raises(EndpointFailed) as caught:
                await anext(found)
    assert caught.value.failure is FailureKind.DROPPED


async def test_a_generator_that_is_closed_resets_the_stream() -> None:
    reset = asyncio.Event()

    async def script(peer: Http2Peer) -> None:
        stream = await asked(peer)
        peer.send(peer.headers(stream, OK) + data(stream, prefixed(b"x")))
        await peer.until(RST_STREAM)
        reset.set()

    async with calling(script) as found:
        assert await anext(found) == b"x"
        await found.aclose()
        await reset.wait()
