"""Work in slices: its result, its end where nobody waits, and the event loop beside it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from gateway import slices
from gateway.errors import InvalidArgument, TimedOut
from gateway.slices import Slices
from gateway.types import Deadline


def add(count: int) -> Slices[int]:
    total = 0
    for number in range(count):
        total += number
        yield
    return total


def endless(begun: threading.Event, ended: threading.Event) -> Slices[None]:
    try:
        while True:
            begun.set()
            yield
    finally:
        ended.set()


async def test_the_result_is_the_same_at_once_and_aside() -> None:
    assert slices.at_once(add(100)) == await slices.aside(add(100)) == 4950


async def test_an_error_reaches_the_caller() -> None:
    def fail() -> Slices[None]:
        yield
        raise InvalidArgument("wrong")

    with pytest.raises(InvalidArgument, match="wrong"):
        await slices.aside(fail())


async def test_a_caller_that_is_cancelled_ends_the_work() -> None:
    begun, ended = threading.Event(), threading.Event()
    task = asyncio.create_task(slices.aside(endless(begun, ended)))
    assert await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 30)


async def test_a_deadline_ends_the_work() -> None:
    begun, ended = threading.Event(), threading.Event()
    with pytest.raises(TimedOut):
        await slices.aside(endless(begun, ended), Deadline.after(0.01))


async def test_the_event_loop_has_its_turn_between_slices() -> None:
    def busy() -> Slices[None]:
        for _ in range(200):
            end = time.thread_time() + 0.001
            while time.thread_time() < end:
                pass
            yield

    turns = 0
    work = asyncio.ensure_future(slices.aside(busy()))
    while not work.done():
        await asyncio.sleep(0.0005)
        turns += 1
    assert turns >= 20
