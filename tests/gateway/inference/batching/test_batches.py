"""Requests that wait run together, each gets its own answer, and none harms another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest

from modelport.gateway.backends.base import Execution
from modelport.gateway.errors import Internal, Unavailable
from modelport.gateway.inference.batching import Schedulers
from modelport.gateway.inference.batching.dynamic_batching import BatchingSettings
from modelport.gateway.inference.batching.dynamic_batching import read as read_settings
from modelport.gateway.inference.batching.joining import Joiner
from modelport.gateway.inference.batching.queue import next_batch_length
from modelport.gateway.repository import config as configuration
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import (
    NO_DEADLINE,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)
from tests.gateway.inference.batching.batchers import (
    CONFIG,
    all_of,
    arrived,
    ask,
    gathered,
    make,
    request,
    tensor,
    values,
)
from tests.polling import until

FOREVER = "dynamic_batching { max_queue_delay_microseconds: 3600000000 }"


# -- what runs together ---------------------------------------------------------------------------


async def test_a_free_instance_runs_what_is_there_and_a_busy_one_gathers() -> None:
    infer, model, _ = make()
    answers = await gathered(infer, model, *(request(n) for n in range(1, 6)))
    assert model.batches == [[1, 2, 3, 4, 5]]
    assert [values(answer) for answer in answers] == [[[2 * n]] for n in range(1, 6)]


async def test_a_batch_is_no_larger_than_the_model_takes_and_requests_keep_their_order() -> None:
    infer, model, _ = make()
    sizes = (3, 3, 3, 8, 1, 1)
    asked = [request(*[10 * i + k for k in range(n)]) for i, n in enumerate(sizes)]
    answers = await gathered(infer, model, *asked)
    assert [len(batch) for batch in model.batches] == [6, 3, 8, 2]
    assert [row for batch in model.batches for row in batch] == [
        10 * i + k for i, n in enumerate(sizes) for k in range(n)
    ]
    for i, (answer, n) in enumerate(zip(answers, sizes, strict=True)):
        assert values(answer) == [[2 * (10 * i + k)] for k in range(n)]


async def test_as_many_run_at_once_as_there_are_instances() -> None:
    infer, model, _ = make("dynamic_batching { } instance_group { count: 3 }")
    model.hold()
    tasks = [ask(infer, request(n)) for n in range(1, 10)]
    await model.begun(3)
    await arrived()
    assert model.batches == [[1], [2], [3]]
    await model.go_on()
    await all_of(*tasks)
    assert model.batches[3:] == [[4, 5, 6, 7, 8, 9]]
    assert model.most_at_once == 3


async def test_only_requests_of_one_shape_go_together_and_the_oldest_goes_first() -> None:
    infer, model, _ = make()
    asked = [request(n, length=1 + n % 2) for n in range(1, 7)]
    answers = await gathered(infer, model, *asked)
    assert model.batches == [[1, 3, 5], [2, 4, 6]]
    assert [values(a) for a in answers] == [[[2 * n] * (1 + n % 2)] for n in range(1, 7)]


async def test_requests_with_and_without_an_optional_input_do_not_go_together() -> None:
    config = CONFIG + (
        'input { name: "z" data_type: TYPE_FP32 dims: -1 optional: true }\n'
        'output { name: "w" data_type: TYPE_FP32 dims: -1 }\n'
    )
    infer, model, _ = make(config=config)
    both = [request(n) for n in range(1, 5)]
    for each in both[::2]:
        each.inputs.append(Tensor("z", Datatype.FP32, each.inputs[0].data * 10))
    both[2].inputs.reverse()  # the order of the inputs does not matter
    answers = await gathered(infer, model, *both)
    assert [len(batch) for batch in model.batches] == [2, 2]
    named = [{t.name: t.data[0, 0] for t in answer.outputs} for answer in answers]
    assert named == [{"y": 2, "w": 20}, {"y": 4}, {"y": 6, "w": 60}, {"y": 8}]


def test_requests_without_inputs_have_a_row_each() -> None:
    """One row for all of them, of a model with values of its own, is no answer to the second."""
    config = configuration.parse(CONFIG)
    config.input[0].optional = True
    joiner = Joiner(configuration.signature(config), parameters=False)
    asked = [InferRequest("m", []), InferRequest("m", [])]
    for rows, whole in (([[1], [2]], True), ([[1]], False)):
        response = InferResponse("m", 1, [tensor("y", Datatype.FP32, rows)])
        with contextlib.nullcontext() if whole else pytest.raises(Internal, match="batch of 2"):
            answers = joiner.split(response, joiner.join(asked), asked)
            assert [values(answer) for answer in answers] == [[[1]], [[2]]]


@pytest.mark.parametrize(("reads", "batches"), [(True, [[1, 3, 4], [2]]), (False, [[1, 2, 3, 4]])])
async def test_other_parameters_part_requests_only_where_the_model_sees_them(
    reads: bool, batches: list[list[int]]
) -> None:
    infer, model, _ = make(parameters=reads)
    asked = [request(1, a=1), request(2, a=True), request(3, a=1, priority=7), request(4, a=1)]
    await gathered(infer, model, *asked)
    assert model.batches == batches
    assert model.requests[1].parameters == ({"a": 1} if reads else {})


async def test_requests_that_passed_through_other_gateways_keep_their_header() -> None:
    infer, model, _ = make(parameters=True)
    asked = [request(number) for number in (1, 2, 3, 4)]
    asked[1].via = asked[3].via = "1.1 other"
    await gathered(infer, model, *asked)
    assert model.batches == [[1, 3], [2, 4]]
    assert [joined.via for joined in model.requests[1:]] == ["", "1.1 other"]


TWO = CONFIG + (
    'input { name: "z" data_type: TYPE_FP32 dims: -1 }\n'
    'output { name: "w" data_type: TYPE_FP32 dims: -1 }\n'
)


async def test_a_batch_computes_every_output_that_is_wanted_and_each_gets_its_own() -> None:
    infer, model, _ = make(config=TWO)

    def both(n: int, *outputs: str) -> InferRequest:
        asked = request(n, outputs=outputs)
        asked.inputs.append(Tensor("z", Datatype.FP32, asked.inputs[0].data * 10))
        return asked

    answers = await gathered(infer, model, both(1, "w"), both(2, "y"), first=both(100))
    assert model.requests[1].outputs == ("w", "y")
    assert [[t.name for t in answer.outputs] for answer in answers] == [["w"], ["y"]]
    answers = await gathered(infer, model, both(1, "w", "y"), both(2), first=both(100))
    assert model.requests[3].outputs == ()
    assert [[t.name for t in answer.outputs] for answer in answers] == [["w", "y"], ["y", "w"]]


async def test_answers_are_views_of_the_batchs_answer() -> None:
    infer, model, _ = make()
    one, two = await gathered(infer, model, request(1), request(2))
    assert one.outputs[0].data.base is not None
    assert one.outputs[0].data.base is two.outputs[0].data.base
    assert not np.shares_memory(one.outputs[0].data, two.outputs[0].data)


@pytest.mark.parametrize(
    ("datatype", "rows"), [(Datatype.BYTES, [b"", b"a\0", b"\xff" * 9]), (Datatype.BF16, [1, 2, 3])]
)
async def test_bytes_and_bfloat16_are_joined_as_they_are(datatype: Datatype, rows: Any) -> None:
    kind = "STRING" if datatype is Datatype.BYTES else datatype
    config = CONFIG.replace("TYPE_FP32 dims: -1", f"TYPE_{kind} dims: 1")
    infer, model, _ = make(config=config)
    rows = rows if datatype is Datatype.BYTES else [[row] for row in rows]
    asked = [InferRequest("m", [tensor("x", datatype, [row])]) for row in rows]
    first = InferRequest("m", asked[0].inputs)
    answers = await gathered(infer, model, *asked, first=first)
    assert [len(batch) for batch in model.batches] == [3]
    for row, answer in zip(rows, answers, strict=True):
        expected = tensor("x", datatype, [row]).data
        assert (answer.outputs[0].data == expected + expected).all()
        assert answer.outputs[0].data.dtype == expected.dtype


async def test_a_model_that_does_not_batch_has_its_queue_and_runs_one_by_one() -> None:
    policy = "dynamic_batching { default_queue_policy { max_queue_size: 2 } }"
    infer, model, _ = make(policy, CONFIG.replace("8", "0"))
    answers = await gathered(infer, model, *(request(n) for n in (1, 2, 3)))
    assert model.batches == [[1], [2]]
    assert isinstance(answers[2], Unavailable)


async def test_what_batches_itself_is_left_alone_unless_asked() -> None:
    for execution, extra, batched in (
        ({"batches": True}, "dynamic_batching { }", False),
        ({}, "", False),
        ({}, "dynamic_batching { }", True),
        (
            {"batches": True},
            'dynamic_batching { } parameters { key: "batch_here" value { string_value: "true" } }',
            True,
        ),
    ):
        infer, model, _ = make(extra, **execution)
        assert (infer is not model) == batched


# -- when it runs: preferred sizes and the delay ---------------------------------------------------


def settings(extra: str) -> BatchingSettings:
    return read_settings(configuration.parse(f"max_batch_size: 8 {extra}"))


@pytest.mark.parametrize(
    ("preferred", "delay", "sizes", "waited", "count"),
    [
        ([], 0, [1], 0, 1),
        ([], 0, [1] * 20, 0, 8),
        ([], 0, [5, 5], 0, 1),
        ([], 0, [3, 3, 3], 0, 2),
        ([4], 0, [1, 1, 1], 0, 3),  # no preferred size can be had: what is there
        ([4], 0, [1] * 7, 0, 4),
        ([2, 4], 0, [1] * 7, 0, 4),
        ([2, 4], 0, [1] * 3, 0, 2),
        ([4], 0, [3, 3], 0, 1),  # past the largest preferred size it is cut
        ([4], 0, [6, 1], 0, 1),
        ([], 1, [1] * 7, 0.5, 0),
        ([], 1, [1] * 8, 0, 8),
        ([], 1, [1] * 7, 1, 7),
        ([], 1, [5, 5], 0, 1),  # it cannot grow
        ([4, 6], 1, [1] * 3, 0, 0),
        ([4, 6], 1, [1] * 5, 0, 4),
        ([4, 6], 1, [1] * 5, 1, 5),  # waited enough: as it is
        ([4, 6], 1, [1] * 9, 1, 8),
        ([4], 1, [1, 1, 3], 0, 2),
    ],
)
def test_the_size_of_a_batch(
    preferred: list[int], delay: int, sizes: list[int], waited: float, count: int
) -> None:
    asked = settings(
        f"dynamic_batching {{ preferred_batch_size: {preferred} "
        f"max_queue_delay_microseconds: {delay * 1_000_000} }}"
    )
    assert next_batch_length(sizes, waited, asked) == count


async def test_with_a_delay_a_full_batch_runs_at_once() -> None:
    infer, model, _ = make(FOREVER)
    tasks = [ask(infer, request(n)) for n in range(1, 8)]
    await arrived()
    assert model.batches == []
    tasks.append(ask(infer, request(8)))
    await all_of(*tasks)
    assert model.batches == [[1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize("kinds", [[2, 2, 3], [2, 3, 3], [2, 3, 4], [2, 3, 2, 4, 4]])
async def test_with_a_delay_a_request_of_another_shape_ends_the_wait_of_those_before_it(
    kinds: list[int],
) -> None:
    """Requests of the last shape wait on, as in Triton."""
    infer, model, _ = make(FOREVER)
    tasks = [ask(infer, request(n, length=kind)) for n, kind in enumerate(kinds)]
    await arrived()
    ended = [task for task, kind in zip(tasks, kinds, strict=True) if kind != kinds[-1]]
    await all_of(*ended)
    ran = [n for batch in model.batches for n in batch]
    assert ran == [n for n, kind in enumerate(kinds) if kind != kinds[-1]]
    waiting = tasks[-1]
    assert not waiting.done()
    for task in tasks:
        task.cancel()
    await all_of(*(task for task in tasks if task not in ended))


async def test_a_request_that_stays_alone_runs_when_the_delay_is_over_and_not_before() -> None:
    infer, model, _ = make("dynamic_batching { max_queue_delay_microseconds: 30000 }")
    loop = asyncio.get_running_loop()
    started = loop.time()
    await all_of(ask(infer, request(1)))
    assert loop.time() - started >= 0.03
    assert model.batches == [[1]]


async def test_nothing_is_left_behind_of_a_request_that_went_while_it_was_delayed() -> None:
    infer, model, _ = make(FOREVER)
    task = ask(infer, request(1))
    await arrived()
    task.cancel()
    await all_of(task)
    timers = getattr(asyncio.get_running_loop(), "_scheduled", [])
    assert all(timer.cancelled() for timer in timers)
    assert model.batches == []


# -- the statistics --------------------------------------------------------------------------------


async def test_a_batch_is_one_execution_and_each_request_has_its_queue_time() -> None:
    infer, model, statistics = make()
    asked = [request(n) for n in range(1, 5)]
    await gathered(infer, model, *asked)
    for each in asked:
        assert each.timing.counted
        assert each.timing.queue_ns > 0
        statistics.succeeded(1, 1, each.timing)
    document = statistics.document("m", 1)
    assert document["execution_count"] == 2
    assert [(b["batch_size"], b["compute_infer"]["count"]) for b in document["batch_stats"]] == [
        (1, 1),
        (4, 1),
    ]
    assert document["inference_count"] == document["inference_stats"]["queue"]["count"] == 4


async def test_what_runs_on_the_spot_neither_waits_nor_is_joined() -> None:
    infer, _, statistics = make(inline=lambda request: True)
    asked = request(1)
    assert values(await finished(infer(asked, NO_DEADLINE))) == [[2]]
    assert not asked.timing.counted  # the data plane counts it
    assert statistics.execution_count == 0


class EarlyResponses:
    """A backend of streams whose execution ends after their responses."""

    execution = Execution(batches=False)

    def __init__(self) -> None:
        self.config = configuration.complete(
            configuration.parse(CONFIG + "dynamic_batching { }"), "m"
        )
        self.ends = asyncio.Event()

    def open(self, request: InferRequest, deadline: Deadline) -> asyncio.Event:
        return asyncio.Event()

    async def stream(self, *_: Any) -> AsyncGenerator[InferResponse, None]:
        raise AssertionError
        yield

    async def responses(self, opened: asyncio.Event) -> AsyncGenerator[InferResponse, None]:
        await opened.wait()
        yield InferResponse("m", 1, [])

    async def execute_together(self, opened: Sequence[asyncio.Event]) -> None:
        for each in opened:
            each.set()
        await self.ends.wait()


async def test_an_execution_that_ends_after_its_responses_is_counted() -> None:
    backend, statistics = EarlyResponses(), Statistics()
    signature = configuration.signature(backend.config)
    stream = Schedulers(backend, statistics).streams(signature)  # type: ignore[arg-type]
    assert stream is not None

    assert len([each async for each in stream(request(1), NO_DEADLINE)]) == 1
    assert statistics.execution_count == 0
    backend.ends.set()
    await until(lambda: statistics.execution_count == 1)
