"""Requests that end before their task's first step: they hold no model version afterwards."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelport.gateway.models.model import ServedVersion
from modelport.gateway.protocols.grpc_method import Methods
from modelport.gateway.protocols.http_message import Handler
from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.server.app import GatewayServer
from modelport.gateway.server.grpc.connection import GrpcConnection
from modelport.gateway.server.grpc.service import Service
from modelport.gateway.server.grpc.stream import GrpcStream
from modelport.gateway.server.http1.connection import HttpConnection
from modelport.gateway.server.http1.exchange import Exchange, HttpServerState
from modelport.gateway.server.http2.http import Http2ServerConnection
from modelport.gateway.server.listener import ServerState
from modelport.gateway.server.listening_socket import ConnectionLimit
from modelport.gateway.wire.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    ErrorCode,
    frame,
    reset,
)
from tests.faults.test_deadlines import HTTP, grpc_entries, repository, socketless
from tests.gateway.server.grpc_peer import MAX_MESSAGE, REQUEST, SETTLED, Wire, block, prefixed

MODELS = ("m", "slow", "many", "chain")
#: Requests that have a version as soon as their handler is called.
AT_ONCE = {"OIP", "OIP, a version", "an ensemble", "ModelInfer"}
Connection = HttpConnection | Http2ServerConnection | GrpcConnection


def requests_of(connection: Connection) -> list[Any]:
    state = connection._state if isinstance(connection, HttpConnection) else connection.state
    return list(state.requests)


def cancel_all(connection: Connection) -> None:
    for each in requests_of(connection):
        each.cancel()


#: How a request ends, right after it has come.
ENDS: dict[str, Callable[[Connection], None]] = {
    "reset": lambda connection: connection.data_received(reset(1, ErrorCode.CANCEL)),
    "connection lost": lambda connection: connection.connection_lost(None),
    "cancelled": cancel_all,
}


def over_http1(handler: Handler, path: str, body: bytes) -> Connection:
    state = HttpServerState(handler, ConnectionLimit(10**6), (), (), None)
    connection = HttpConnection(state, asyncio.get_running_loop())
    connection.connection_made(Wire())
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.data_received(head.encode() + body)
    return connection


def over_http2(handler: Handler, path: str, body: bytes) -> Connection:
    state = HttpServerState(handler, ConnectionLimit(10**6), (), (), None)
    connection = Http2ServerConnection(state, asyncio.get_running_loop(), False)
    rows = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a"}
    return sent(connection, rows, body)


def over_grpc(methods: Methods, path: str, message: bytes) -> Connection:
    service = Service(methods, MAX_MESSAGE)
    state = ServerState(ConnectionLimit(10**6))
    connection = GrpcConnection(state, service, asyncio.get_running_loop())
    return sent(connection, {**REQUEST, ":path": path}, prefixed(message))


def sent(
    connection: Http2ServerConnection | GrpcConnection, rows: dict[str, str], body: bytes
) -> Connection:
    connection.connection_made(Wire())
    connection.data_received(
        PREFACE
        + SETTLED
        + frame(HEADERS, END_HEADERS, 1, block(rows))
        + frame(DATA, END_STREAM, 1, body)
    )
    return connection


def versions(server: GatewayServer) -> list[ServedVersion]:
    return [server.manager.get(name, 0) for name in MODELS]


async def ended(server: GatewayServer, name: str, connection: Connection, end: str) -> bool:
    """End the request that ``connection`` has got; whether nothing holds a version then."""
    served = versions(server)
    assert requests_of(connection), name
    assert name not in AT_ONCE or any(each.statistics.pending for each in served), name
    ENDS[end](connection)
    for _ in range(20):
        await asyncio.sleep(0)
    if end != "connection lost":
        connection.connection_lost(None)
        await asyncio.sleep(0)
    held = any((each.in_flight, each.statistics.pending) != (0, 0) for each in served)
    for each in served:
        while each.in_flight:
            each.release()  # else the gateway does not end
    return not held


def on_slow(text: str) -> str:
    return text.replace("/m/", "/slow/").replace("/m:", "/slow:").replace("ns/m", "ns/slow")


@pytest.fixture(params=[False, True], ids=["", "known-bad"])
def known_bad(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether a task is cancelled even before its first step."""
    if request.param:
        monkeypatch.setattr(Exchange, "disconnect", cancel_the_task)
        monkeypatch.setattr(Exchange, "cancel", cancel_the_task)
        monkeypatch.setattr(GrpcStream, "_cancel", cancel_the_task)
    yield request.param
    gc.collect()  # what was never awaited warns now, and not in another test


def cancel_the_task(request: Any) -> None:
    if request.task is not None:
        request.task.cancel()


@pytest.mark.filterwarnings("ignore:coroutine '.*' was never awaited")
async def test_a_request_that_ends_before_its_first_step_releases_the_version(
    known_bad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with socketless(repository(tmp_path), monkeypatch) as (server, handler, _):
        before, released = asyncio.all_tasks(), {}
        for over, end in product((over_http1, over_http2), ENDS):
            if over is over_http1 and end == "reset":
                continue  # it has none
            for name in ("OIP",) if known_bad else HTTP:
                path, document, _ = HTTP[name]
                body = httpx.Request("POST", "http://gateway", json=document).content
                connection = over(handler, on_slow(path), body)
                released[over, end, name] = await ended(server, name, connection, end)
        assert released == dict.fromkeys(released, not known_bad)
        assert known_bad or (asyncio.all_tasks(), PROCESS.used_bytes) == (before, 0)


@pytest.mark.filterwarnings("ignore:coroutine '.*' was never awaited")
async def test_a_call_that_ends_before_its_first_step_releases_the_version(
    known_bad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with socketless(repository(tmp_path), monkeypatch) as (server, _, methods):
        before, released = asyncio.all_tasks(), {}
        for end, (service, name, message) in product(ENDS, grpc_entries("slow")):
            if known_bad and name != "ModelInfer":
                continue
            content = getattr(message, "message", message).SerializeToString()
            connection = over_grpc(methods, f"/{service}/{name}", content)
            released[end, name] = await ended(server, name, connection, end)
        assert released == dict.fromkeys(released, not known_bad)
        assert known_bad or (asyncio.all_tasks(), PROCESS.used_bytes) == (before, 0)
