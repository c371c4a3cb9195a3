"""Tests of the request queue: priorities, size limits, time-outs and order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from modelport.gateway.errors import InvalidArgument, QueueFull, TimedOut
from modelport.gateway.types import NO_DEADLINE, InferRequest, finished
from tests.gateway.inference.batching.batchers import (
    CONFIG,
    POISON,
    all_of,
    arrived,
    ask,
    gathered,
    make,
    request,
    values,
)

ONE_BY_ONE = CONFIG.replace("max_batch_size: 8", "max_batch_size: 1")
HOUR = 3_600_000_000


def policy(text: str, extra: str = "") -> str:
    return f"dynamic_batching {{ default_queue_policy {{ {text} }} {extra} }}"


LEVELS = "dynamic_batching { priority_levels: 3 default_priority_level: 2 %s }"


async def order(extra: str, *requests: InferRequest) -> list[float]:
    """In which order they run where each runs alone."""
    infer, model, _ = make(extra, ONE_BY_ONE)
    await gathered(infer, model, *requests)
    return [row for batch in model.batches for row in batch]


# -- priorities ------------------------------------------------------------------------------------


async def test_higher_priorities_overtake_and_equal_ones_keep_their_order() -> None:
    asked = [request(n, priority=p) for n, p in enumerate((3, 2, 1, 3, 1, 2))]
    assert await order(LEVELS % "", *asked) == [2, 4, 1, 5, 0, 3]


async def test_no_priority_and_one_that_does_not_exist_are_the_default_level() -> None:
    asked = [request(0, priority=3), request(1), request(2, priority=0), request(3, priority=4)]
    assert await order(LEVELS % "", *asked, request(4, priority=1)) == [4, 1, 2, 3, 0]


async def test_without_levels_a_priority_changes_nothing() -> None:
    assert await order("dynamic_batching { }", request(0), request(1, priority=1)) == [0, 1]


async def test_a_batch_takes_the_highest_priorities_and_fills_up_with_the_others() -> None:
    infer, model, _ = make(LEVELS % "")
    asked = [request(n, priority=3 - n % 3) for n in range(10)]
    answers = await gathered(infer, model, *asked)
    assert model.batches == [[2, 5, 8, 1, 4, 7, 0, 3], [6, 9]]
    assert [values(answer) for answer in answers] == [[[2 * n]] for n in range(10)]


# -- bounds ----------------------------------------------------------------------------------------


async def test_a_full_queue_refuses_at_once_and_takes_requests_again() -> None:
    infer, model, _ = make(policy("max_queue_size: 2"))
    model.hold()
    tasks = [ask(infer, request(n)) for n in range(3)]
    await model.begun(1)
    await arrived()
    with pytest.raises(QueueFull, match=r"^Exceeds maximum queue size$"):
        await finished(infer(request(3), NO_DEADLINE))
    tasks[1].cancel()
    await all_of(tasks[1])
    tasks.append(ask(infer, request(4)))
    await arrived()
    await model.go_on()
    await all_of(*tasks)
    assert model.batches == [[0], [2, 4]]


async def test_each_level_has_a_bound_of_its_own() -> None:
    text = (
        "default_queue_policy { max_queue_size: 2 } "
        "priority_queue_policy { key: 1 value { max_queue_size: 1 } }"
    )
    infer, model, _ = make(LEVELS % text, ONE_BY_ONE)
    asked = [request(n, priority=p) for n, p in enumerate((1, 1, 2, 2, 2, 3))]
    answers = await gathered(infer, model, *asked)
    assert [isinstance(answer, QueueFull) for answer in answers] == [
        *(False, True, False, False, True, False)
    ]
    assert model.batches == [[0], [2], [3], [5]]


# -- time-outs -------------------------------------------------------------------------------------


async def test_a_request_that_waits_too_long_is_refused_while_the_model_is_still_busy() -> None:
    infer, model, _ = make(policy("default_timeout_microseconds: 20000"))
    model.hold()
    loop = asyncio.get_running_loop()
    first = ask(infer, request(1))
    await model.begun(1)
    started = loop.time()
    (answer,) = await all_of(ask(infer, request(2)))
    assert isinstance(answer, TimedOut)
    assert str(answer) == "Request timeout expired"
    assert loop.time() - started >= 0.02
    assert not first.done()  # only time in the queue counts
    await model.go_on()
    await all_of(first)
    assert model.batches == [[1]]


async def expired(extra: str, *asked: InferRequest) -> tuple[list[float], list[Any]]:
    """In which order those run whose time is up while another runs, and what they get."""
    infer, model, _ = make(extra, ONE_BY_ONE)
    model.hold()
    first = ask(infer, request(100))
    await model.begun(1)
    tasks = [ask(infer, each) for each in asked]
    await arrived()
    await asyncio.sleep(0.03)  # the time in the queue is what is tested
    tasks.append(ask(infer, request(9)))
    await arrived()
    await model.go_on()
    answers = await all_of(first, *tasks)
    return [row for batch in model.batches[1:] for row in batch], answers[1:]


async def test_a_delayed_request_runs_after_all_others_of_its_level() -> None:
    delay = "timeout_action: DELAY default_timeout_microseconds: 20000"
    ran, answers = await expired(policy(delay), request(1), request(2))
    assert ran == [9, 1, 2]
    assert [values(answer) for answer in answers] == [[[2]], [[4]], [[18]]]
    levels = LEVELS % f"default_queue_policy {{ {delay} }}"
    ran, _ = await expired(levels, request(1, priority=1), request(3, priority=3), request(2))
    assert ran == [1, 9, 2, 3]  # the last of its level, and still before lower levels


@pytest.mark.parametrize(
    ("text", "timeout", "refused"),
    [
        (f"default_timeout_microseconds: {HOUR} allow_timeout_override: true", 10_000, True),
        (f"default_timeout_microseconds: {HOUR} allow_timeout_override: false", 10_000, False),
        ("default_timeout_microseconds: 10000 allow_timeout_override: true", HOUR, True),
        (f"default_timeout_microseconds: {HOUR} allow_timeout_override: true", 0, False),
        ("allow_timeout_override: true", 10_000, True),
    ],
)
async def test_a_requests_own_timeout_counts_where_it_may_and_is_shorter(
    text: str, timeout: int, refused: bool
) -> None:
    ran, answers = await expired(policy(text), request(1, timeout=timeout))
    assert ran == ([9] if refused else [1, 9])
    assert isinstance(answers[0], TimedOut) == refused


async def test_no_timer_is_left_when_nobody_waits() -> None:
    infer, _, _ = make(policy(f"default_timeout_microseconds: {HOUR}"))
    await all_of(*(ask(infer, request(n)) for n in range(20)))
    scheduled = getattr(asyncio.get_running_loop(), "_scheduled", [])
    assert all(timer.cancelled() for timer in scheduled)


# -- order of the answers --------------------------------------------------------------------------


ORDERED = "dynamic_batching { preserve_ordering: true } instance_group { count: 2 }"


async def order_of_answers(extra: str, *rows: float, gone: int | None = None) -> list[int]:
    """The rows in the order of their answers, first those answered while row 0 still runs."""
    infer, model, _ = make(extra, ONE_BY_ONE)
    model.blocked = {0.0}
    ended: list[int] = []
    tasks = [ask(infer, request(row)) for row in rows]
    for index, task in enumerate(tasks):
        task.add_done_callback(lambda _, index=index: ended.append(index))  # type: ignore[misc]
    await model.begun(len(rows))
    if gone is not None:
        tasks[gone].cancel()
    while model.running > 1 or not model.running:
        await asyncio.sleep(0)
    await arrived()
    ended.append(-1)
    model.blocked.clear()
    await model.go_on()
    await all_of(*tasks)
    return ended


async def test_answers_come_in_the_order_of_arrival_where_that_is_asked() -> None:
    assert await order_of_answers(ORDERED, 0, 1, POISON, 3) == [-1, 0, 1, 2, 3]
    unordered = ORDERED.replace("true", "false")
    assert await order_of_answers(unordered, 0, 1, POISON, 3) == [1, 2, 3, -1, 0]


async def test_one_that_goes_holds_up_no_answer() -> None:
    """The one that goes has been computed, and waits for row 0."""
    assert await order_of_answers(ORDERED, 0, 1, 2, 3, gone=1) == [1, -1, 0, 2, 3]


async def test_one_whose_time_is_up_holds_up_no_answer() -> None:
    infer, model, _ = make(
        "dynamic_batching { preserve_ordering: true default_queue_policy { "
        "default_timeout_microseconds: 10000 } } instance_group { count: 1 }",
        ONE_BY_ONE,
    )
    model.hold()
    tasks = [ask(infer, request(n)) for n in range(2)]
    await model.begun(1)
    assert isinstance((await all_of(tasks[1]))[0], TimedOut)
    tasks.append(ask(infer, request(2)))
    await arrived()
    await model.go_on()
    answers = await all_of(*tasks)
    assert [values(answers[0]), values(answers[2])] == [[[0]], [[4]]]


async def test_when_the_first_goes_those_that_waited_for_it_are_answered() -> None:
    infer, model, _ = make(ORDERED, ONE_BY_ONE)
    model.blocked = {0.0}
    tasks = [ask(infer, request(row)) for row in (0, 1)]
    await model.begun(2)
    await arrived()
    assert not tasks[1].done()
    tasks[0].cancel()
    assert values((await all_of(tasks[1]))[0]) == [[2]]


# -- configurations that cannot be -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("preferred_batch_size: 0", "preferred size must be positive for m"),
        ("preferred_batch_size: -4", "preferred size must be positive for m"),
        ("preferred_batch_size: [ 4, 9 ]", "must be <= max batch size for m, and 9 is more than 8"),
        ("priority_levels: 2", r"default priority level must be in range \[1, 2\] for m, not 0"),
        ("priority_levels: 2 default_priority_level: 3", r"in range \[1, 2\] for m, not 3"),
        ("default_queue_policy { timeout_action: 7 }", "must be REJECT or DELAY for m, not 7"),
        ("default_priority_level: 1", "need priority_levels, which is 0 for m"),
        ("priority_queue_policy { key: 1 value {} }", "need priority_levels, which is 0 for m"),
        (
            "priority_levels: 2 default_priority_level: 1 priority_queue_policy "
            "{ key: 3 value {} }",
            r"priority queue policy must have priority level in range \[1, 2\] for m, not 3",
        ),
        (
            "preserve_ordering: true priority_levels: 2 default_priority_level: 1",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            "preserve_ordering: true default_queue_policy { timeout_action: DELAY }",
            "can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_when_it_loads(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        make(f"dynamic_batching {{ {text} }}")


def test_a_preferred_size_of_a_model_that_does_not_batch_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="1 is more than 0"):
        make("dynamic_batching { preferred_batch_size: 1 }", CONFIG.replace("8", "0"))


def test_whether_to_batch_here_is_true_or_false() -> None:
    with pytest.raises(InvalidArgument, match="'batch_here' must be true or false, not 'maybe'"):
        make('parameters { key: "batch_here" value { string_value: "maybe" } }')
