"""Fair queueing of callers at a model."""

from __future__ import annotations

import asyncio
import random

import pytest

from modelport.gateway.errors import QueueFull, TimedOut
from modelport.gateway.inference.admission.fair_queue import FairQueue
from modelport.gateway.types import NO_DEADLINE, Deadline


def queue(room: int) -> FairQueue:
    found = FairQueue()
    found.resize(1, 1)
    found.room = room
    return found


async def turns() -> None:
    """Let every task take its next steps."""
    for _ in range(5):
        await asyncio.sleep(0)


class Visits:
    """Requests of callers that stay inside until they are let go."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.inside: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def come(self, caller: str, deadline: Deadline = NO_DEADLINE) -> asyncio.Task[None]:
        async def visit() -> None:
            await self.queue.enter(caller, deadline)
            self.inside.append(caller)

        task = asyncio.get_running_loop().create_task(visit())
        self.tasks.append(task)
        return task

    async def go(self) -> str:
        first = self.inside.pop(0)
        self.queue.leave(first)
        await turns()
        return first


async def test_a_flood_waits_behind_itself_and_others_behind_one_of_its_requests() -> None:
    visits = Visits(queue(2))
    visits.come("other")
    for _ in range(3):
        visits.come("flood")
    await turns()
    visits.come("other")
    await turns()
    assert visits.inside == ["other", "flood"]
    order = [await visits.go() for _ in range(5)]
    assert order == ["other", "flood", "flood", "other", "flood"]
    assert not visits.inside


async def test_a_caller_that_is_alone_never_waits() -> None:
    visits = Visits(queue(2))
    for _ in range(50):
        visits.come("only")
    await turns()
    assert len(visits.inside) == 50
    late = visits.come("late")
    await turns()
    assert not late.done(), "there is no room left"
    for _ in range(49):
        await visits.go()
    assert late.done()


async def test_requests_past_the_room_are_refused_for_their_caller_only() -> None:
    visits = Visits(queue(2))
    visits.come("other")
    flood = [visits.come("flood") for _ in range(4)]
    await turns()
    with pytest.raises(QueueFull):
        await flood[-1]
    late = visits.come("other")
    await turns()
    assert not late.done()
    await visits.go()
    await visits.go()
    assert late.done()
    await late


async def test_a_request_waits_no_longer_than_its_deadline() -> None:
    visits = Visits(queue(1))
    visits.come("a")
    await turns()
    with pytest.raises(TimedOut):
        await visits.come("b", Deadline.after(0.01))
    await visits.go()
    follower = visits.come("c")
    await turns()
    assert follower.done(), "the place of one that gave up is free"


async def test_whatever_is_cancelled_no_place_is_lost() -> None:
    randomness = random.Random(2)
    for _ in range(200):
        visits = Visits(queue(randomness.randint(1, 3)))
        for _ in range(randomness.randint(5, 40)):
            act = randomness.random()
            if act < 0.5:
                visits.come(randomness.choice("abc"))
            elif act < 0.7 and visits.tasks:
                randomness.choice(visits.tasks).cancel()
            elif visits.inside:
                visits.queue.leave(visits.inside.pop(0))
            if randomness.random() < 0.6:
                await turns()
        await turns()
        while visits.inside:
            await visits.go()
        outcomes = await asyncio.gather(*visits.tasks, return_exceptions=True)
        assert all(
            each is None or isinstance(each, QueueFull | asyncio.CancelledError)
            for each in outcomes
        )
        last = [visits.come("x"), visits.come("y")][0]
        await turns()
        assert last.done()
