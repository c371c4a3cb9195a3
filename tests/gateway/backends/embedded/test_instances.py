"""Threads before a blocking runtime: a bounded queue, deadlines, cancellation, errors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import pytest

from modelport.gateway.backends.embedded.instances import Instances
from modelport.gateway.errors import Internal, TimedOut, Unavailable
from modelport.gateway.repository.config import DEFAULT_MAX_QUEUE_SIZE
from modelport.gateway.types import (
    NO_DEADLINE,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)
from tests.polling import WAIT_SECONDS, until


class Runtime:
    """A blocking runtime under the test's control. ``computed``: the ids it ran, in order."""

    def __init__(self) -> None:
        self.computed: list[str] = []
        self.threads: set[int] = set()
        self.busy = threading.Semaphore(0)
        self._go = threading.Event()
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()

    def hold(self) -> None:
        self._go.clear()

    def go_on(self) -> None:
        self._go.set()

    def __call__(self, request: InferRequest) -> InferResponse:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        self.threads.add(threading.get_ident())
        self.busy.release()
        assert self._go.wait(WAIT_SECONDS)
        with self._lock:
            self._at_once -= 1
            self.computed.append(request.id)
        if request.id.startswith("poison"):
            raise Internal(f"{request.id} failed")
        return InferResponse(request.model_name, 1, [], request.id)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    made = Runtime()
    yield made
    made.go_on()


Make = Callable[..., Instances]


@pytest.fixture
def instances(runtime: Runtime) -> Iterator[Make]:
    made: list[Instances] = []

    def make(count: int = 1, max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE) -> Instances:
        made.append(Instances(runtime, "test", count, max_queue_size))
        return made[-1]

    yield make
    runtime.go_on()
    for one in made:
        one.close()


def request(name: str = "r", elements: int = 1) -> InferRequest:
    return InferRequest("m", [Tensor("x", Datatype.FP32, np.zeros(elements, np.float32))], id=name)


async def begun(runtime: Runtime) -> None:
    """Wait until the runtime has begun one more request."""
    assert await asyncio.to_thread(runtime.busy.acquire, timeout=WAIT_SECONDS)


def ask(
    instances: Instances, name: str, deadline: Deadline = NO_DEADLINE
) -> asyncio.Task[InferResponse]:
    async def run(answer: Awaitable[InferResponse]) -> InferResponse:
        return await answer

    return asyncio.create_task(run(instances(request(name), deadline)))


async def queued(instances: Instances, count: int) -> None:
    await until(lambda: instances._pending == count)


# -- order and bounds -----------------------------------------------------------------------------


async def test_requests_are_answered_in_the_order_they_came(
    runtime: Runtime, instances: Make
) -> None:
    one = instances()
    tasks = [ask(one, str(i)) for i in range(5)]
    await queued(one, 5)
    runtime.go_on()
    assert [(await task).id for task in tasks] == list("01234")
    assert runtime.computed == list("01234")


async def test_no_more_run_at_once_than_there_are_instances(
    runtime: Runtime, instances: Make
) -> None:
    two = instances(count=2)
    tasks = [ask(two, str(i)) for i in range(6)]
    await begun(runtime)
    await begun(runtime)
    runtime.go_on()
    await asyncio.gather(*tasks)
    assert runtime.most_at_once == 2


async def test_a_full_queue_refuses_at_once_while_another_runs(
    runtime: Runtime, instances: Make
) -> None:
    one = instances(count=1, max_queue_size=2)
    tasks = [ask(one, name) for name in ("runs", "waits", "waits too")]
    await begun(runtime)
    await queued(one, 3)
    with pytest.raises(Unavailable, match=r"^Exceeds maximum queue size$"):
        await asyncio.wait_for(one(request("refused"), NO_DEADLINE), WAIT_SECONDS)
    assert runtime.computed == []
    runtime.go_on()
    await asyncio.gather(*tasks)
    assert "refused" not in runtime.computed


async def test_the_queue_takes_requests_again_once_one_is_done(
    runtime: Runtime, instances: Make
) -> None:
    one = instances(count=1, max_queue_size=1)
    tasks = [ask(one, "a"), ask(one, "b")]
    await queued(one, 2)
    runtime.go_on()
    await asyncio.gather(*tasks)
    assert (await one(request("c"), NO_DEADLINE)).id == "c"


async def test_time_spent_waiting_is_counted_as_queue_time(
    runtime: Runtime, instances: Make
) -> None:
    one = instances()
    first = ask(one, "first")
    await begun(runtime)
    waiting = request("waiting")
    started = time.perf_counter_ns()
    second = asyncio.create_task(asyncio.wait_for(one(waiting, NO_DEADLINE), WAIT_SECONDS))
    await queued(one, 2)
    runtime.go_on()
    await asyncio.gather(first, second)
    assert 0 < waiting.timing.queue_ns <= time.perf_counter_ns() - started


# -- deadlines ------------------------------------------------------------------------------------


async def test_a_deadline_that_has_passed_is_refused_before_anything(
    runtime: Runtime, instances: Make
) -> None:
    with pytest.raises(TimedOut, match=r"^Request timeout expired$"):
        await instances()(request(), Deadline.after(0))
    assert runtime.computed == []


async def test_a_request_given_up_at_its_deadline_in_the_queue_is_never_computed(
    runtime: Runtime, instances: Make
) -> None:
    """The data plane gives it up; here its turn comes later, and is passed over."""
    one = instances()
    first = ask(one, "first")
    await begun(runtime)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(one(request("late"), Deadline.after(0.05)), 0.05)
    runtime.go_on()
    assert (await first).id == "first"
    assert (await one(request("next"), NO_DEADLINE)).id == "next"
    assert runtime.computed == ["first", "next"]


async def test_a_request_given_up_while_it_runs_leaves_the_instance_in_order(
    runtime: Runtime, instances: Make
) -> None:
    one = instances()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(one(request("slow"), Deadline.after(0.05)), 0.05)
    assert one._pending == 1  # it cannot be stopped: the instance is busy until it ends
    runtime.go_on()
    assert (await one(request("next"), NO_DEADLINE)).id == "next"
    await queued(one, 0)


async def test_a_deadline_is_checked_at_the_dequeue_even_when_the_loop_is_late(
    runtime: Runtime, instances: Make
) -> None:
    """The event loop's own timer cannot fire while this test holds the loop."""
    one = instances()
    first = ask(one, "first")
    await begun(runtime)
    second = ask(one, "late", Deadline.after(0.02))
    await queued(one, 2)
    time.sleep(0.05)  # not synchronisation: it holds the event loop past the deadline
    runtime.go_on()
    with contextlib.suppress(TimedOut):
        await second
    await first
    assert (await one(request("next"), NO_DEADLINE)).id == "next"
    assert runtime.computed == ["first", "next"]


async def test_an_answer_in_time_leaves_no_timer_behind(runtime: Runtime, instances: Make) -> None:
    runtime.go_on()
    response = await instances()(request("quick"), Deadline.after(60))
    assert response.id == "quick"
    loop = asyncio.get_running_loop()
    timers = [t for t in getattr(loop, "_scheduled", []) if not t.cancelled()]
    assert timers == []


# -- cancellation ---------------------------------------------------------------------------------


async def test_a_request_cancelled_before_its_turn_is_never_computed(
    runtime: Runtime, instances: Make
) -> None:
    one = instances()
    first, gone, last = (ask(one, name) for name in ("first", "gone", "last"))
    await begun(runtime)
    await queued(one, 3)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    runtime.go_on()
    assert ((await first).id, (await last).id) == ("first", "last")
    assert runtime.computed == ["first", "last"]


async def test_what_a_cancelled_request_held_is_free_while_the_others_still_wait(
    runtime: Runtime, instances: Make
) -> None:
    one = instances()
    first = ask(one, "first")
    await begun(runtime)
    waiting = request("gone")
    array = weakref.ref(waiting.inputs[0].data)
    gone = asyncio.create_task(asyncio.wait_for(one(waiting, NO_DEADLINE), WAIT_SECONDS))
    del waiting
    await queued(one, 2)
    assert array() is not None
    gone.cancel()
    await asyncio.wait({gone})
    assert gone.cancelled()
    del gone
    gc.collect()
    assert array() is None
    assert not first.done()
    runtime.go_on()
    assert (await first).id == "first"


async def test_cancelling_the_one_that_runs_leaves_the_others_unharmed(
    runtime: Runtime, instances: Make
) -> None:
    one = instances()
    gone = ask(one, "gone")
    await begun(runtime)
    others = [ask(one, str(i)) for i in range(3)]
    await queued(one, 4)
    gone.cancel()
    runtime.go_on()
    assert [(await other).id for other in others] == list("012")
    await queued(one, 0)


async def test_random_cancellation_never_delivers_an_answer_to_another(
    runtime: Runtime, instances: Make
) -> None:
    random = np.random.default_rng(0)
    two = instances(count=2)
    runtime.go_on()
    tasks = {}
    for number in range(300):
        tasks[number] = ask(two, str(number))
        if random.random() < 0.5:
            await asyncio.sleep(0)
        for victim in random.choice(300, 2):
            if victim in tasks and random.random() < 0.4:
                tasks[victim].cancel()
    answers = await asyncio.wait_for(
        asyncio.gather(*tasks.values(), return_exceptions=True), WAIT_SECONDS
    )
    cancelled = [a for a in answers if isinstance(a, asyncio.CancelledError)]
    for number, answer in enumerate(answers):
        assert isinstance(answer, asyncio.CancelledError) or (
            isinstance(answer, InferResponse) and answer.id == str(number)
        )
    assert 0 < len(cancelled) < 300
    await queued(two, 0)


async def test_places_in_the_queue_come_back_whatever_ends_a_request(
    runtime: Runtime, instances: Make
) -> None:
    one = instances(count=1, max_queue_size=8)
    tasks = [ask(one, "ok"), ask(one, "poison"), ask(one, "gone")]
    await queued(one, 3)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(one(request("late"), Deadline.after(0.01)), 0.01)
    assert one._pending == 3  # nobody waits for it: its place is free at once
    tasks[2].cancel()
    runtime.go_on()
    await asyncio.gather(*tasks, return_exceptions=True)
    await queued(one, 0)


# -- errors ---------------------------------------------------------------------------------------


async def test_an_error_reaches_its_own_caller_only(runtime: Runtime, instances: Make) -> None:
    one = instances()
    names = ["0", "1", "poison", "3", "4", "5", "6", "7"]
    tasks = [ask(one, name) for name in names]
    runtime.go_on()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    for name, answer in zip(names, answers, strict=True):
        if name == "poison":
            assert isinstance(answer, Internal)
            assert str(answer) == "poison failed"
        else:
            assert isinstance(answer, InferResponse)
            assert answer.id == name


# -- inline ---------------------------------------------------------------------------------------


async def test_small_requests_run_on_the_event_loop_where_that_is_allowed(
    runtime: Runtime, instances: Make
) -> None:
    runtime.go_on()
    one = instances()
    one.allow_inline(4)
    await finished(one(request(elements=4), NO_DEADLINE))
    assert runtime.threads == {threading.get_ident()}


async def test_larger_requests_run_in_a_thread(runtime: Runtime, instances: Make) -> None:
    runtime.go_on()
    one = instances()
    one.allow_inline(4)
    await one(request(elements=5), NO_DEADLINE)
    assert threading.get_ident() not in runtime.threads


async def test_nothing_runs_on_the_event_loop_unless_it_is_allowed(
    runtime: Runtime, instances: Make
) -> None:
    runtime.go_on()
    await instances()(request(elements=0), NO_DEADLINE)
    assert threading.get_ident() not in runtime.threads


async def test_a_small_request_does_not_overtake_those_that_wait(
    runtime: Runtime, instances: Make
) -> None:
    one = instances()
    first = ask(one, "first")
    await begun(runtime)
    one.allow_inline(4)
    second = ask(one, "second")
    await queued(one, 2)
    runtime.go_on()
    await asyncio.gather(first, second)
    assert runtime.computed == ["first", "second"]


# -- the end --------------------------------------------------------------------------------------


async def test_closing_waits_for_the_one_that_runs(runtime: Runtime) -> None:
    one = Instances(runtime, "test", 1)
    task = ask(one, "last")
    await begun(runtime)
    closing = asyncio.create_task(asyncio.to_thread(one.close))
    runtime.go_on()
    await closing
    assert (await task).id == "last"


async def test_a_request_after_the_end_is_refused_and_does_not_wait(
    runtime: Runtime, instances: Make
) -> None:
    one = instances()
    runtime.go_on()
    await ask(one, "before")
    await asyncio.to_thread(one.close)
    with pytest.raises(Unavailable, match=r"^the model is unloaded$"):
        await asyncio.wait_for(one(request("after"), NO_DEADLINE), WAIT_SECONDS)
    assert runtime.computed == ["before"]
