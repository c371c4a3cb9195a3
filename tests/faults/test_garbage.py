"""Requests that have ended: nothing of them waits for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelport.gateway.server.http1.exchange import Exchange
from tests.faults.test_deadlines import HTTP, grpc_entries, repository, socketless
from tests.faults.test_early_cancellation import (
    Connection,
    over_grpc,
    over_http1,
    over_http2,
    requests_of,
)


@pytest.fixture(params=[False, True], ids=["", "known-bad"])
def known_bad(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether an HTTP request and its exchange refer to each other for good."""
    if request.param:
        monkeypatch.setattr(Exchange, "_over", Exchange.release)
    gc.collect()
    gc.freeze()  # collections visit what the requests make, and not all that was imported
    gc.disable()
    yield request.param
    gc.enable()
    gc.unfreeze()


async def answered(begin: Callable[[], Connection]) -> Connection:
    connection = begin()
    async with asyncio.timeout(10.0):
        while requests_of(connection):
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    return connection


async def garbage(begin: Callable[[], Connection]) -> list[str]:
    """Answer a request, and return the gateway's types in the circles that it has left."""
    (await answered(begin)).connection_lost(None)  # the first one makes what is kept
    gc.collect()
    connection = await answered(begin)
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        types = {type(each) for each in gc.garbage}
        return sorted(t.__qualname__ for t in types if t.__module__.startswith("modelport."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        connection.connection_lost(None)


async def test_an_answered_request_leaves_nothing_to_the_garbage_collector(
    known_bad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[tuple[Any, str], list[str]] = {}
    async with socketless(repository(tmp_path), monkeypatch) as (_, handler, methods):
        for name, (path, document, _) in HTTP.items():
            if "chain" in path:  # it takes a minute
                continue
            body = httpx.Request("POST", "http://gateway", json=document).content
            for over in (over_http1, over_http2):
                found[over, name] = await garbage(partial(over, handler, path, body))
        for service, name, message in grpc_entries():
            content = getattr(message, "message", message).SerializeToString()
            path = f"/{service}/{name}"
            found[path, name] = await garbage(partial(over_grpc, methods, path, content))
    left = {each: types for each, types in found.items() if types}
    assert (not left) != known_bad, left
