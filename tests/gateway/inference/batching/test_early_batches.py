"""The batch after the one that runs is told ahead, and is still nobody's until it begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from modelport.gateway.backends.base import Execution
from modelport.gateway.backends.embedded.instances import Instances
from modelport.gateway.types import Deadline, Infer, InferRequest, InferResponse, Tensor, finished
from tests.gateway.inference.batching.batchers import (
    all_of,
    arrived,
    ask,
    make,
    request,
    values,
)
from tests.polling import WAIT_SECONDS

PAIRS = "dynamic_batching { preferred_batch_size: 2 %s }"


class Threaded:
    """``y = 2 x`` in a thread, each run held until it is let go. ``batches``: the rows of each."""

    problem = ""

    def __init__(self, config: Any, execution: Execution) -> None:
        self.config, self.execution = config, execution
        self.batches: list[list[float]] = []
        self._begun, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self.instances = Instances(self._run, "test", 1)

    def _run(self, request: InferRequest) -> InferResponse:
        data = request.inputs[0].data
        self.batches.append(data[:, 0].tolist())
        self._begun.release()
        assert self._go.acquire(timeout=WAIT_SECONDS)
        return InferResponse("m", 1, [Tensor("y", request.inputs[0].datatype, data * 2)])

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        return await finished(self.instances(request, deadline))

    def begun(self) -> None:
        """Wait until one more has begun; the event loop stands still meanwhile."""
        assert self._begun.acquire(timeout=WAIT_SECONDS)

    def go_on(self, runs: int = 1) -> None:
        self._go.release(runs)


Make = Callable[..., tuple[Infer, Threaded]]


@pytest.fixture
def pairs() -> Iterator[Make]:
    made: list[Threaded] = []

    def of(extra: str = "", ahead: int = 1) -> tuple[Infer, Threaded]:
        infer, model, _ = make(PAIRS % extra, model=Threaded, queues=True, ahead=ahead)
        made.append(model)
        return infer, model

    yield of
    for model in made:
        model.go_on(100)
        model.instances.close()


async def test_the_next_batch_begins_without_the_event_loop(pairs: Make) -> None:
    infer, model = pairs()
    tasks = [ask(infer, request(0))]
    await arrived()
    model.begun()
    tasks += [ask(infer, request(n)) for n in (1, 2, 3)]
    await arrived()
    model.go_on()
    model.begun()
    assert model.batches == [[0], [1, 2]]
    model.go_on(2)
    answers = await all_of(*tasks)
    assert [values(answer) for answer in answers] == [[[0]], [[2]], [[4]], [[6]]]
    assert model.batches == [[0], [1, 2], [3]]


@pytest.mark.parametrize(
    ("extra", "ahead"),
    [("", 0), ("priority_levels: 2 default_priority_level: 2", 1)],
)
async def test_no_batch_is_submitted_early_where_that_is_disabled(
    pairs: Make, extra: str, ahead: int
) -> None:
    infer, model = pairs(extra, ahead)
    tasks = [ask(infer, request(0))]
    await arrived()
    model.begun()
    tasks += [ask(infer, request(n)) for n in (1, 2)]
    await arrived()
    assert model.instances._pending == 1
    model.go_on(2)
    await all_of(*tasks)


async def test_what_may_still_grow_waits(pairs: Make) -> None:
    infer, model = pairs()
    tasks = [ask(infer, request(0))]
    await arrived()
    model.begun()
    tasks.append(ask(infer, request(1)))
    await arrived()
    assert model.instances._pending == 1
    tasks.append(ask(infer, request(2)))
    await arrived()
    assert model.instances._pending == 2
    model.go_on(2)
    await all_of(*tasks)
    assert model.batches == [[0], [1, 2]]


async def test_one_that_goes_is_not_computed_and_the_other_keeps_its_place(pairs: Make) -> None:
    infer, model = pairs()
    first = ask(infer, request(0))
    await arrived()
    model.begun()
    gone, stays, other, last = (ask(infer, request(n)) for n in (1, 2, 3, 4))
    await arrived()
    gone.cancel()
    await all_of(gone)
    await arrived()
    model.go_on(3)
    await all_of(first, stays, other, last)
    assert model.batches == [[0], [2, 3], [4]]
    assert values(stays.result()) == [[4]]
    assert model.instances._pending == 0


async def test_a_batch_that_everyone_has_left_is_not_computed(pairs: Make) -> None:
    infer, model = pairs()
    first = ask(infer, request(0))
    await arrived()
    model.begun()
    both = [ask(infer, request(n)) for n in (1, 2)]
    await arrived()
    for each in both:
        each.cancel()
    await all_of(*both)
    await arrived()
    assert model.instances._pending == 1
    model.go_on(2)
    await all_of(first, ask(infer, request(3)))
    assert model.batches == [[0], [3]]
