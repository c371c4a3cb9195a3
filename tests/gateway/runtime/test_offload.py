"""Work off the event loop: its result, its end where nobody waits, and the event loop beside it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from modelport.gateway.errors import InvalidArgument, TimedOut
from modelport.gateway.runtime import offload
from modelport.gateway.runtime.request_memory import CURRENT, Lease, RequestMemory, reserve
from modelport.gateway.types import Deadline


class Endless:
    """Work that ends at a checkpoint only."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def __call__(self) -> None:
        try:
            while True:
                self.begun.set()
                offload.checkpoint()
        finally:
            self.ended.set()


async def test_the_result_is_the_works() -> None:
    assert await offload.run(lambda: sum(range(100))) == 4950


async def test_an_error_reaches_the_caller() -> None:
    def fail() -> None:
        raise InvalidArgument("wrong")

    with pytest.raises(InvalidArgument, match="wrong"):
        await offload.run(fail)


async def test_a_caller_that_is_cancelled_ends_the_work() -> None:
    work = Endless()
    task = asyncio.create_task(offload.run(work))
    assert await asyncio.to_thread(work.begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(work.ended.wait, 30)


async def test_a_deadline_ends_the_work() -> None:
    work = Endless()
    with pytest.raises(TimedOut):
        await offload.run(work, Deadline.after(0.01))
    assert not work.begun.is_set() or work.ended.is_set()


async def test_work_whose_time_is_over_does_not_begin() -> None:
    work = Endless()
    with pytest.raises(TimedOut):
        await offload.run(work, Deadline.after(0))
    assert not work.begun.is_set()


def test_what_is_done_at_once_has_no_end_but_its_own() -> None:
    offload.checkpoint()


async def test_what_the_work_reserves_is_the_requests() -> None:
    lease = Lease(RequestMemory(1000).connection())
    token = CURRENT.set(lease)
    try:
        await offload.run(lambda: reserve(10))
    finally:
        CURRENT.reset(token)
    assert lease.size == 10


async def test_the_event_loop_has_its_turns_beside_the_work() -> None:
    def busy() -> None:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            offload.checkpoint()

    turns = 0
    work = asyncio.ensure_future(offload.run(busy))
    while not work.done():
        await asyncio.sleep(0.0005)
        turns += 1
    assert turns >= 20
