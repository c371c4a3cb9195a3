"""``ModelStreamInfer``: the order of its answers, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from modelport.gateway.protocols.oip.grpc_stream import StreamInfer
from modelport.gateway.types import NO_DEADLINE, Deadline
from modelport.gateway.wire.proto import grpc_service_pb2 as pb


def handler(infer: Callable[[Any, Deadline], Awaitable[Any]]) -> StreamInfer:
    """The handler, for a model that responds once."""
    model = SimpleNamespace(decoupled=False)
    manager: Any = SimpleNamespace(closing=asyncio.Event(), get=lambda *_: model)
    return StreamInfer(manager, infer, lambda *_: pytest.fail("it is not decoupled"))


def request(id: str) -> Any:
    return pb.ModelInferRequest(model_name="m", id=id)


async def test_what_was_asked_before_a_failure_of_the_gateway_is_answered() -> None:
    failed = asyncio.Event()

    async def infer(message: Any, _: Deadline) -> Any:
        if message.id == "bad":
            failed.set()
            raise RuntimeError("a mistake in the gateway")
        await failed.wait()
        await asyncio.sleep(0.05)
        return pb.ModelInferResponse(id=message.id)

    async def messages() -> AsyncIterator[Any]:
        for id in ("good", "bad"):
            yield request(id)

    replies = handler(infer)(messages(), NO_DEADLINE)
    assert (await anext(replies)).infer_response.id == "good"
    with pytest.raises(RuntimeError, match="a mistake in the gateway"):
        await anext(replies)


async def test_a_request_that_comes_while_the_call_is_cancelled_is_not_begun() -> None:
    came: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    waiting, begun = asyncio.Event(), []

    async def infer(message: Any, _: Deadline) -> Any:
        begun.append(message.id)

    async def messages() -> AsyncIterator[Any]:
        waiting.set()
        yield await came

    replies = handler(infer)(messages(), NO_DEADLINE)
    call = asyncio.ensure_future(anext(replies))
    await waiting.wait()
    call.cancel()
    came.set_result(request("late"))  # in the same turn of the event loop
    with pytest.raises(asyncio.CancelledError):
        await call
    for _ in range(10):
        await asyncio.sleep(0)
    assert begun == []
