"""Responses that nobody reads hold no more memory than the budget; those that are read all come."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from modelport.gateway.errors import MemoryExhausted
from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse
from modelport.gateway.runtime import request_memory
from modelport.gateway.runtime.request_memory import PROCESS, RequestMemory, UnreadResponse
from modelport.gateway.server.grpc.connection import GrpcConnection
from modelport.gateway.server.grpc.service import Service
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.listener import ServerState
from modelport.gateway.server.listening_socket import ConnectionLimit, bind
from modelport.gateway.types import Deadline
from modelport.gateway.wire.http2.frames import (
    DATA,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PREFACE,
    RST_STREAM,
    ErrorCode,
    frame,
    settings,
    window_update,
)
from tests.attacks import unread
from tests.gateway.server.grpc_peer import MethodProbe, Wire, connected, head, listening, prefixed
from tests.server import serving


@pytest.mark.thorough
@pytest.mark.timeout(1200)  # each attack waits until the server is idle, on a busy machine for long
def test_no_route_or_method_holds_more_than_the_budget_unread(tmp_path: Path) -> None:
    flags = ("--max-request-memory", str(unread.BUDGET_BYTES))
    with serving(unread.repository(tmp_path), *flags) as gateway:
        attacks = unread.attacks(gateway)
        random.Random(0).shuffle(attacks)
        assert unread.findings(gateway, attacks[:16]) == []


@pytest.mark.thorough
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "known-bad"])
def test_what_is_unread_is_bounded_and_a_server_that_does_not_count_is_caught(
    tmp_path: Path, counted: bool
) -> None:
    """Without a budget that counts, four connections hold hundreds of megabytes."""
    budget = unread.BUDGET_BYTES if counted else 1 << 40
    with serving(unread.repository(tmp_path), "--max-request-memory", str(budget)) as gateway:
        wide = unread.attacks(gateway, "/ModelInfer connection")[-1:]
        assert bool(unread.findings(gateway, wide)) is not counted


#: Of a call that is answered with what it sends.
LARGE = prefixed(BytesValue(value=bytes(400_000)).SerializeToString())
#: Windows for messages of this size, of streams and of the connection.
WIDE = PREFACE + settings((INITIAL_WINDOW_SIZE, 2**20)) + window_update(0, 2**30)
NOTHING = PREFACE + settings((INITIAL_WINDOW_SIZE, 0))


def ask(stream: int, path: str = "/probe.Probe/Echo") -> bytes:
    parts = (LARGE[at : at + 16_000] for at in range(0, len(LARGE), 16_000))
    sent = [head(stream, path=path), *(frame(DATA, 0, stream, part) for part in parts)]
    return b"".join([*sent, frame(DATA, END_STREAM, stream, b"")])


async def test_large_requests_and_answers_at_once_on_a_small_budget_make_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every admitted request is answered: its answer takes the place of its body."""
    monkeypatch.setattr(PROCESS, "limit_bytes", 4 * len(LARGE))
    monkeypatch.setattr(request_memory, "CONNECTION_SHARE", 1)
    probe = MethodProbe()
    served = 0

    async def echo(message: Any, _: Deadline) -> Any:
        nonlocal served
        served += 1
        return message

    monkeypatch.setattr(probe, "_echo", echo)
    async with listening(probe) as server:

        async def client() -> int:
            answered, stream = 0, 1
            async with connected(server.port, WIDE) as peer:
                while answered < 5:
                    peer.send(ask(stream))
                    data, fields = await peer.answer(stream)
                    assert fields["grpc-status"] in ("0", "8")
                    answered += fields["grpc-status"] == "0" and data == LARGE
                    stream += 2
            return answered

        assert sum(await asyncio.gather(*(client() for _ in range(8)))) == served == 40
    assert PROCESS.used_bytes == PROCESS.rendering == len(PROCESS.unread) == 0


@pytest.mark.parametrize("stalled", [True, False])
async def test_an_answer_that_has_stalled_makes_room_for_others(
    stalled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PROCESS, "limit_bytes", 2 * len(LARGE) + 20_000)
    monkeypatch.setattr(request_memory, "CONNECTION_SHARE", 1)
    monkeypatch.setattr(request_memory, "STALLED_SECONDS", 0.0 if stalled else 1e9)
    async with listening() as server, connected(server.port, NOTHING) as idle:
        idle.send(ask(1), ask(3))
        for stream in (1, 3):
            await idle.until(HEADERS, stream=stream)
        async with connected(server.port, WIDE) as peer:
            peer.send(ask(1))
            status = (await peer.answer(1))[1]["grpc-status"]
        assert status == ("0" if stalled else "8")
        if stalled:
            assert await idle.code(RST_STREAM) == ErrorCode.ENHANCE_YOUR_CALM


async def test_calls_that_are_refused_to_a_client_that_does_not_read_are_bounded() -> None:
    """Trailers have no window: they were written however much was unread."""
    wire = Wire()
    service = Service(MethodProbe().methods(), 2**20)
    state = ServerState(ConnectionLimit())
    connection = GrpcConnection(state, service, asyncio.get_running_loop())
    connection.connection_made(wire)
    connection.data_received(PREFACE + settings())
    connection.pause_writing()
    before = len(wire.written)
    for stream in range(1, 2001, 2):
        connection.data_received(head(stream, path="/no.Service/Method"))
    assert len(wire.written) == before
    assert PROCESS.used_bytes >= 1000 * request_memory.RESPONSE_BYTES
    connection.resume_writing()
    assert wire.written.count(b"grpc-status") == 1000
    connection.connection_lost(None)
    assert PROCESS.used_bytes == 0


async def test_a_pipelined_request_is_served_when_the_answer_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is larger than the budget, and is sent all the same."""
    monkeypatch.setattr(PROCESS, "limit_bytes", 1 << 20)
    served, size = 0, 20 << 20

    def app(request: HttpRequest) -> HttpResponse:
        nonlocal served
        served += 1
        return HttpResponse(200, bytes(size))

    listener = HttpListener(app, bind("127.0.0.1", 0, "--http-port"))
    await listener.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
        await reader.readuntil(b"\r\n\r\n")
        assert (served, len(PROCESS.unread)) == (1, 1)
        for _ in range(2):
            await reader.readexactly(size)
            await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(size)
        assert served == 3
    finally:
        writer.close()
        await listener.drain(Deadline.after(0))
    assert PROCESS.used_bytes == 0


async def test_requests_of_a_connection_take_turns_while_its_answers_are_unread() -> None:
    connection = RequestMemory(1 << 20).connection()
    unread_ones = [UnreadResponse(connection, lambda: None) for _ in range(9)]
    for each in unread_ones[: request_memory.MOST_UNREAD]:
        each.hold(1)
    made: list[int] = []

    async def render(number: int) -> None:
        async with connection.turn():
            made.append(number)

    waiting = [asyncio.create_task(render(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert not made
    waiting[0].cancel()
    unread_ones[0].release()
    await asyncio.gather(*waiting[1:])
    assert made == [1, 2]


def test_the_only_response_may_exceed_the_budgets_and_no_other() -> None:
    memory = RequestMemory(10_000)
    first, second = (UnreadResponse(memory.connection(), lambda: None) for _ in range(2))
    first.hold(1_000_000)
    with pytest.raises(MemoryExhausted):
        second.hold(1)
    first.release()
    second.hold(1)
    second.release()
    assert (memory.used_bytes, len(memory.unread), memory.refused) == (0, 0, 1)
