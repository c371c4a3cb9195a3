"""The rest of a deadline is sent with every request to another server and never grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from modelport.gateway.errors import TimedOut
from modelport.gateway.repository.routes_file import ModelRoute, load
from modelport.gateway.types import NO_DEADLINE, Deadline
from modelport.gateway.upstream.grpc import GrpcChannel, replies
from modelport.gateway.upstream.http import HttpSession
from modelport.gateway.wire.deadline_headers import HTTP_TIMEOUT, http_deadline

REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server's address, and the heads of the requests that it got."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(REPLY)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


def route(folder: Path, address: str) -> ModelRoute:
    file = folder / "routes.toml"
    file.write_text(f'[models.m]\nbackend = "triton"\nendpoints = ["{address}"]\n')
    return load(file)["m"]


def told(head: bytes) -> int | None:
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == HTTP_TIMEOUT:
            return int(value)
    return None


async def test_the_longest_timeout_that_a_client_may_state_crosses_a_hop(tmp_path: Path) -> None:
    longest_seconds = (2**64 - 1) / 1e6
    async with listening() as (address, heads):
        session = HttpSession(route(tmp_path, address))
        try:
            await session.ask("POST", address, "/", Deadline.after(longest_seconds), b"{}")
        finally:
            await session.close()
    stated = told(heads[0])
    remaining = http_deadline({HTTP_TIMEOUT: str(stated).encode()}).remaining()
    assert remaining == pytest.approx(longest_seconds)


async def test_the_remaining_time_is_sent_and_decreases(tmp_path: Path) -> None:
    async with listening() as (address, heads):
        session = HttpSession(route(tmp_path, address))
        try:
            deadline = Deadline.after(20)
            for _ in range(3):
                await session.ask("POST", address, "/", deadline, b"{}", {"a": "b"})
                await asyncio.sleep(0.002)
            await session.ask("GET", address, "/", NO_DEADLINE)
        finally:
            await session.close()
    found = [told(head) for head in heads]
    assert found.pop() is None
    numbers = [number for number in found if number is not None]
    assert len(numbers) == 3
    assert 19_000 < numbers[2] < numbers[1] < numbers[0] <= 20_000
    assert all(b"a: b" in head for head in heads[:3])


async def test_a_request_whose_time_is_over_is_not_sent(tmp_path: Path) -> None:
    async with listening() as (address, heads):
        session = HttpSession(route(tmp_path, address))
        channel = GrpcChannel(address, route(tmp_path, address))
        try:
            with pytest.raises(TimedOut):
                await session.ask("POST", address, "/", Deadline.after(0), b"{}")
            with pytest.raises(TimedOut):
                await anext(replies(channel.method("/a/b"), b"", bytes, Deadline.after(0)))
        finally:
            await session.close()
            await channel.close()
    assert heads == []
