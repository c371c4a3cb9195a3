"""Requests that go, are late or are poison: none of them harms those it shares a batch with."""

from __future__ import annotations

import asyncio

import pytest

from modelport.gateway.errors import Internal, TimedOut, Unavailable
from modelport.gateway.types import NO_DEADLINE, Deadline, InferRequest, InferResponse, finished
from tests.gateway.inference.batching.batchers import (
    POISON,
    DoublingModelBackend,
    all_of,
    arrived,
    ask,
    gathered,
    make,
    request,
    values,
)

# -- requests that go, or whose time is up ---------------------------------------------------------


async def test_a_request_cancelled_while_it_waits_is_never_computed() -> None:
    infer, model, _ = make()
    model.hold()
    first = ask(infer, request(100))
    await model.begun(1)
    one, gone, two = (ask(infer, request(n)) for n in (1, 2, 3))
    await arrived()
    gone.cancel()
    await model.go_on()
    await all_of(first, one, gone, two)
    assert gone.cancelled()
    assert model.batches == [[100], [1, 3]]
    assert (values(one.result()), values(two.result())) == ([[2]], [[6]])


async def test_a_request_cancelled_while_it_runs_leaves_its_batch_mates_unharmed() -> None:
    infer, model, _ = make()
    model.hold()
    first = ask(infer, request(100))
    await model.begun(1)
    one, gone, two = (ask(infer, request(n)) for n in (1, 2, 3))
    await arrived()
    await model.go_on(1)
    await first
    await model.begun(2)
    gone.cancel()
    await all_of(gone)
    await model.go_on()
    await all_of(one, two)
    assert (values(one.result()), values(two.result())) == ([[2]], [[6]])
    assert model.cancelled == 0


@pytest.mark.parametrize("interruptible", [True, False])
async def test_when_everyone_of_a_batch_is_gone_what_can_be_stopped_is(interruptible: bool) -> None:
    infer, model, statistics = make(interruptible=interruptible)
    model.hold()
    tasks = [ask(infer, request(1))]
    await model.begun(1)
    waits = ask(infer, request(2))
    await arrived()
    tasks[0].cancel()
    await all_of(*tasks)
    await arrived()
    # What computes on keeps its instance busy: the next does not queue behind it elsewhere.
    assert (model.cancelled, len(model.batches)) == ((1, 2) if interruptible else (0, 1))
    await model.go_on()
    assert values((await all_of(waits))[0]) == [[4]]
    assert statistics.execution_count == (1 if interruptible else 2)


async def test_a_request_whose_deadline_has_passed_is_not_computed_even_when_the_loop_is_late() -> (
    None
):
    infer, model, _ = make()
    with pytest.raises(TimedOut):
        await finished(infer(request(1), Deadline.after(-1)))
    model.hold()
    first = ask(infer, request(100))
    await model.begun(1)
    deadline = Deadline.after(60)
    late, other = ask(infer, request(1), deadline), ask(infer, request(2))
    await arrived()
    deadline.at = 0.0
    await model.go_on()
    answers = await all_of(first, late, other)
    assert isinstance(answers[1], TimedOut)
    assert model.batches == [[100], [2]]


async def test_a_batch_has_the_latest_deadline_of_its_members() -> None:
    infer, model, _ = make()
    near, far = Deadline.after(50), Deadline.after(100)
    for deadlines, expected in (((near, far), far.at), ((near, NO_DEADLINE), None)):
        before = len(model.batches)
        model.hold()
        first = ask(infer, request(100))
        await model.begun(before + 1)
        tasks = [ask(infer, request(n), d) for n, d in enumerate(deadlines)]
        await arrived()
        await model.go_on()
        await all_of(first, *tasks)
        assert len(model.batches) == before + 2
        assert model.deadlines[-1].at == expected


async def test_a_backend_that_cancels_its_own_run_hangs_no_request() -> None:
    infer, model, _ = make()
    model.error = asyncio.CancelledError()
    answers = await gathered(infer, model, request(1), request(2))
    assert [str(answer) for answer in answers] == ["the execution was cancelled"] * 2
    model.error = None
    assert values((await all_of(ask(infer, request(3))))[0]) == [[6]]


# -- requests that fail ----------------------------------------------------------------------------


async def test_a_poison_request_fails_alone() -> None:
    infer, model, statistics = make()
    rows = [1, 2, 3, POISON, 5, 6, 7, 8]
    answers = await gathered(infer, model, *(request(n) for n in rows))
    assert model.batches == [rows, *([row] for row in rows)]
    for row, answer in zip(rows, answers, strict=True):
        if row == POISON:
            assert isinstance(answer, Internal)
            assert str(answer) == "poison"
        else:
            assert values(answer) == [[2 * row]]
    assert statistics.execution_count == 1 + 7


async def test_a_poison_request_whose_client_has_gone_is_not_tried_again() -> None:
    infer, model, _ = make()
    model.hold()
    first = ask(infer, request(100))
    await model.begun(1)
    gone, stays = ask(infer, request(POISON)), ask(infer, request(2))
    await arrived()
    await model.go_on(1)
    await first
    await model.begun(2)
    gone.cancel()
    await model.go_on()
    assert values((await all_of(stays))[0]) == [[4]]
    assert model.batches[1:] == [[POISON, 2], [2]]


async def test_an_error_of_the_server_goes_to_all_requests_without_a_retry() -> None:
    infer, model, _ = make()
    model.error = Unavailable("down")
    answers = await gathered(infer, model, *(request(n) for n in (1, 2, 3)))
    assert [(type(a), str(a)) for a in answers] == [(Unavailable, "down")] * 3
    assert len(set(map(id, answers))) == 3
    assert model.batches == [[1, 2, 3]]


class Liar(DoublingModelBackend):
    """Answers a batch with one row too few."""

    def answer(self, request: InferRequest) -> InferResponse:
        response = super().answer(request)
        data = response.outputs[0].data
        response.outputs[0].data = data[:-1] if len(data) > 1 else data
        return response


async def test_a_batch_whose_answer_has_the_wrong_rows_is_run_again_one_by_one() -> None:
    infer, model, _ = make(model=Liar)
    answers = await gathered(infer, model, *(request(n) for n in (1, 2, 3)))
    assert model.batches == [[1, 2, 3], [1], [2], [3]]
    assert [values(answer) for answer in answers] == [[[2]], [[4]], [[6]]]
