"""Admission: what would wait too long is refused when it comes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gateway import admission
from gateway.errors import QueueFull
from gateway.repository import config as configuration
from gateway.types import (
    NO_DEADLINE,
    Datatype,
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
    Tensor,
)

QUEUE = "dynamic_batching { default_queue_policy { %s } }"
BOUNDED = QUEUE % "default_timeout_microseconds: 20000"
SERVICE_SECONDS = 0.01


class Server:
    """Answers one after the other, as one busy instance does."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self.waits: list[float] = []

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        come = asyncio.get_running_loop().time()
        async with self._turn:
            self.waits.append(asyncio.get_running_loop().time() - come)
            await asyncio.sleep(SERVICE_SECONDS)
        return InferResponse("m", 1, [])


def request(**parameters: int) -> InferRequest:
    inputs = [Tensor("x", Datatype.FP32, np.zeros((1, 4), np.float32))]
    return InferRequest("m", inputs, parameters=parameters)


def admitted(infer: Infer, text: str) -> Infer:
    return admission.wrap(infer, configuration.parse(f'name: "m" max_batch_size: 1 {text}'))


async def flood(infer: Infer, seconds: float, per_second: float) -> tuple[int, int]:
    """Answered and refused, open loop."""
    loop = asyncio.get_running_loop()
    start, tasks = loop.time(), []
    while (now := loop.time()) < start + seconds:
        due = int((now - start) * per_second) + 1 - len(tasks)
        tasks += [asyncio.ensure_future(infer(request(), NO_DEADLINE)) for _ in range(due)]
        await asyncio.sleep(0.001)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = sum(isinstance(result, QueueFull) for result in results)
    assert refused + sum(isinstance(result, InferResponse) for result in results) == len(results)
    return len(results) - refused, refused


async def warm(infer: Infer) -> None:
    """So many answers that the interval between them is known."""
    for _ in range(5):
        await infer(request(), NO_DEADLINE)


async def test_under_ten_times_too_much_the_wait_stays_what_the_policy_allows() -> None:
    server = Server()
    infer = admitted(server, BOUNDED)
    await warm(infer)
    server.waits.clear()
    answered, refused = await flood(infer, 0.5, 10 / SERVICE_SECONDS)
    # The machine is busy: what counts is the number in front, whatever each of them takes.
    assert sorted(server.waits)[len(server.waits) // 2] < 8 * SERVICE_SECONDS
    assert refused > 4 * answered
    assert answered >= 10


async def test_the_check_sees_a_queue_without_admission() -> None:
    server = Server()
    answered, refused = await flood(server, 0.2, 10 / SERVICE_SECONDS)
    assert refused == 0
    assert sorted(server.waits)[answered // 2] > 8 * SERVICE_SECONDS


async def test_what_comes_one_by_one_is_never_refused() -> None:
    infer = admitted(Server(), QUEUE % "default_timeout_microseconds: 1")
    await warm(infer)


async def test_it_recovers_at_once_and_a_failure_or_a_cancel_leaves_nothing_behind() -> None:
    server = Server()
    infer = admitted(server, BOUNDED)
    await warm(infer)
    tasks = [asyncio.ensure_future(infer(request(), NO_DEADLINE)) for _ in range(30)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(infer, admission.Admission)
    assert infer.wait_seconds == 0
    await infer(request(), NO_DEADLINE)


async def test_a_request_may_allow_less_than_the_policy_where_that_allows_it() -> None:
    policy = "default_timeout_microseconds: 10000000 allow_timeout_override: true"
    infer = admitted(Server(), QUEUE % policy)
    await warm(infer)
    behind = [asyncio.ensure_future(infer(request(), NO_DEADLINE)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await infer(request(timeout=1000), NO_DEADLINE)
    await infer(request(), NO_DEADLINE)
    await asyncio.gather(*behind)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dynamic_batching { }",
        QUEUE % "max_queue_size: 3",
        QUEUE % "default_timeout_microseconds: 1000 timeout_action: DELAY",
    ],
)
def test_without_a_bound_on_the_wait_nothing_stands_between(text: str) -> None:
    server: Infer = pytest.fail  # never called
    assert admitted(server, text) is server
