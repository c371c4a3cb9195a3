"""Copies for the candidate: compared, counted, and no harm to the requests of clients."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.gateway.backends.capabilities import BlockingInfer
from modelport.gateway.errors import Internal, QueueFull
from modelport.gateway.rollout.plan import ComparisonKind, RolloutLimits
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.rollout.traffic import shadow
from modelport.gateway.runtime.background_thread import BackgroundThread
from modelport.gateway.types import Datatype, InferRequest, InferResponse, Tensor, finished
from tests.gateway.rollout.sides import CONFIG, Sides, failing, never, sides, times

ENDED = ("compared", "failed", "dropped")


@pytest.fixture
def thread() -> Iterator[BackgroundThread]:
    made = BackgroundThread("copies")
    yield made
    made.close()


def triple(request: InferRequest) -> InferResponse:
    data = request.inputs[0].data * np.float32(3)
    return InferResponse("m", 2, [Tensor("y", Datatype.FP32, data)])


def in_thread(found: Sides, thread: BackgroundThread, infer: BlockingInfer) -> None:
    """Have the candidate answer copies by ``infer``, in ``thread``."""
    found.manager.get("m", 2).in_background = lambda work: thread.do(partial(work, infer))


async def ended(found: Sides, copies: int, stage: int = 0) -> StageCounts:
    """The counts once so many copies have ended."""
    async with asyncio.timeout(60):
        while sum(getattr(counts := found.counts(stage), name) for name in ENDED) < copies:
            await asyncio.sleep(0.001)
    return counts


async def test_a_copy_is_compared_and_the_client_gets_the_baselines_answer(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(2))
    found.apply(1.0, "shadow")
    for _ in range(5):
        assert (await found.ask()).model_version == 1
    counts = await ended(found, 5)
    assert (counts.compared, counts.disagreed, counts.invalid) == (5, 0, 0)
    assert counts.baseline.requests == 5
    assert counts.candidate.requests == 0
    assert found.rollouts.examples("m") == []


async def test_answers_that_differ_are_counted_and_the_first_are_kept(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(1.0, "shadow", keep_inputs=2)
    for number in range(4):
        await found.ask(number + 1, 2, id=f"r{number}", parameters={"customer": 7})
    counts = await ended(found, 4)
    assert (counts.compared, counts.disagreed) == (4, 4)
    first, second = found.rollouts.examples("m")
    assert json.loads(json.dumps(first)) == {
        "id": "r0",
        "parameters": {"customer": 7},
        "stage": 0,
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [2.0, 4.0]}],
        "candidate_outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [3.0, 6.0]}
        ],
    }
    assert second["id"] == "r1"


async def test_private_requests_are_not_kept(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(1.0, "shadow", keep_inputs=0)
    await found.ask()
    await ended(found, 1)
    assert found.rollouts.examples("m") == []


async def test_a_candidate_that_computes_here_answers_and_is_compared_in_its_thread(
    tmp_path: Path, thread: BackgroundThread
) -> None:
    found = await sides(tmp_path, never)
    threads = set[int]()

    def infer(request: InferRequest) -> InferResponse:
        threads.add(threading.get_ident())
        return triple(request)

    in_thread(found, thread, infer)
    found.apply(1.0, "shadow")
    for _ in range(5):
        assert (await found.ask()).model_version == 1
    counts = await ended(found, 5)
    assert (counts.compared, counts.disagreed, counts.baseline.requests) == (5, 5, 5)
    assert threading.get_ident() not in threads
    assert len(threads) == 1
    assert found.rollouts.examples("m")[0]["candidate_outputs"][0]["data"] == [3.0, 6.0]
    assert found.manager.get("m", 2).in_flight == 0


async def test_a_candidate_whose_thread_hangs_fails_and_its_late_answers_do_not_count(
    tmp_path: Path, thread: BackgroundThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "DEADLINE_SECONDS", 0.01)
    monkeypatch.setattr(shadow, "PATIENCE_SECONDS", 0.01)
    found, finish = await sides(tmp_path, never), threading.Event()

    def hang(request: InferRequest) -> InferResponse:
        assert finish.wait(60)
        return triple(request)

    in_thread(found, thread, hang)
    found.apply(1.0, "shadow")
    for _ in range(3):
        await found.ask()
    assert (await ended(found, 3)).failed == 3
    assert found.manager.get("m", 2).in_flight == 0
    monkeypatch.undo()
    finish.set()
    await found.ask()
    counts = await ended(found, 4)
    assert (counts.failed, counts.compared, counts.dropped) == (3, 1, 0)


async def test_a_stop_drops_the_copy_that_a_thread_answers(
    tmp_path: Path, thread: BackgroundThread
) -> None:
    found = await sides(tmp_path, never)
    begun, finish = threading.Event(), threading.Event()

    def hang(request: InferRequest) -> InferResponse:
        begun.set()
        assert finish.wait(60)
        return triple(request)

    in_thread(found, thread, hang)
    found.apply(1.0, "shadow")
    await found.ask()
    assert await asyncio.to_thread(begun.wait, 60)
    found.apply(0.0)
    assert found.manager.get("m", 2).in_flight == 0
    finish.set()
    await asyncio.to_thread(thread.close)
    counts = found.counts()
    assert (counts.dropped, counts.compared, counts.failed) == (1, 0, 0)


async def test_a_share_of_the_requests_is_copied(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(2))
    found.apply(0.1, "shadow")
    for _ in range(500):
        await found.ask()
        await asyncio.sleep(0)
    counts = found.counts()
    assert 20 < counts.compared + counts.dropped < 90


async def test_a_candidate_that_fails_is_seen_by_the_analysis_alone(tmp_path: Path) -> None:
    found = await sides(tmp_path, failing(Internal("broken")))
    found.apply(1.0, "shadow")
    for _ in range(3):
        assert (await found.ask()).model_version == 1
    counts = await ended(found, 3)
    assert (counts.failed, counts.compared, counts.errors.total) == (3, 0, 0)
    assert found.rollouts.examples("m")[0]["candidate_outputs"] is None


async def test_a_candidate_that_breaks_the_contract_does_not_end_the_comparison(
    tmp_path: Path,
) -> None:
    found = await sides(tmp_path, failing(KeyError("a defect")))
    found.apply(1.0, "shadow")
    await found.ask()
    await ended(found, 1)

    async def nonsense(_: InferRequest) -> InferResponse:
        return InferResponse("m", 2, [Tensor("y", Datatype.FP32, None)])  # type: ignore[arg-type]

    found.candidate.answer = nonsense
    await found.ask()
    await ended(found, 2)
    found.candidate.answer = times(2)
    await found.ask()
    assert (await ended(found, 3)).compared == 1


async def test_a_candidate_that_hangs_harms_nobody_and_copies_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "DEADLINE_SECONDS", 2.0)
    found = await sides(tmp_path, never)
    found.apply(1.0, "shadow")
    for _ in range(100):
        assert (await found.ask()).model_version == 1
        await asyncio.sleep(0)
    assert len(found.candidate.asked) == 1  # one at a time
    counts = found.counts()
    assert counts.dropped == 100 - 1 - shadow.MAX_COPIES
    assert (await ended(found, counts.dropped + 1)).failed == 1
    found.apply(0.0)
    counts = await ended(found, 100)  # the one in progress ends in a step of its own
    assert sum(getattr(counts, name) for name in ENDED) == 100
    assert found.manager.get("m", 2).in_flight == 0


async def test_a_full_candidate_drops_a_copy_and_has_not_failed(tmp_path: Path) -> None:
    found = await sides(tmp_path, failing(QueueFull()))
    found.apply(1.0, "shadow")
    await found.ask()
    counts = await ended(found, 1)
    assert (counts.dropped, counts.failed) == (1, 0)


@pytest.mark.parametrize("number", [1, 2])
async def test_no_copy_is_sent_while_a_side_is_overloaded_and_the_stage_says_so(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "MANY_DROPPED", 3)
    found = await sides(tmp_path, times(2))
    found.apply(1.0, "shadow")
    side = found.manager.get("m", number)
    for others in range(3):
        assert found.problem() == "", others
        side.overloaded = lambda: True
        await found.ask()
    assert found.counts().dropped == 3
    name = {1: "baseline", 2: "candidate"}[number]
    assert found.problem() == f"the last 3 copies were dropped: the {name} is overloaded"
    side.overloaded = lambda: False
    await found.ask()
    assert (await ended(found, 4)).compared == 1
    assert found.problem() == ""


async def test_copies_are_sent_while_another_model_is_overloaded(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(2))
    found.apply(1.0, "shadow")
    found.manager.overloaded.add(object())  # type: ignore[arg-type]
    await found.ask()
    assert (await ended(found, 1)).compared == 1


async def test_tensors_of_waiting_copies_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "MAX_BYTES", 4 * 4 * 3)
    found = await sides(tmp_path, never)
    found.apply(1.0, "shadow")
    for _ in range(5):
        await found.ask()
        await asyncio.sleep(0)
    assert found.counts().dropped == 1  # one is in progress, three wait
    found.apply(0.0)


async def test_a_copy_waits_for_a_moment_without_requests_of_clients(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(2))
    found.apply(1.0, "shadow")
    finish = asyncio.Event()

    async def slow(request: InferRequest) -> InferResponse:
        await finish.wait()
        return await times(2)(request)

    await found.ask()
    found.baseline.answer = slow
    task = asyncio.create_task(found.ask())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not found.candidate.asked
    finish.set()
    await task
    await ended(found, 2)
    assert len(found.candidate.asked) == 2


async def test_a_copy_does_not_wait_forever_for_a_busy_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "PATIENCE_SECONDS", 0.01)
    found = await sides(tmp_path, times(2))
    found.apply(1.0, "shadow")
    await found.ask()
    found.baseline.answer = never
    task = asyncio.create_task(found.ask())
    assert (await ended(found, 1)).compared == 1
    task.cancel()


async def test_a_stop_drops_every_copy(tmp_path: Path) -> None:
    found = await sides(tmp_path, never)
    found.apply(1.0, "shadow")
    for _ in range(5):
        await found.ask()
        await asyncio.sleep(0)
    asked = len(found.candidate.asked)
    found.apply(0.0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(found.candidate.asked) == asked == 1
    assert found.counts().dropped == 5
    assert found.manager.get("m", 2).in_flight == 0


async def test_statistics_batches_and_caches_see_no_copy(tmp_path: Path) -> None:
    batching = "dynamic_batching { max_queue_delay_microseconds: 1000 }\n"
    found = await sides(tmp_path, times(2), CONFIG + batching)
    found.apply(1.0, "shadow")
    for _ in range(3):
        await found.ask()
    await ended(found, 3)
    document = {
        number: found.manager.get("m", number).statistics.document("m", number) for number in (1, 2)
    }
    assert document[1]["inference_count"] == document[1]["execution_count"] == 3
    assert document[2]["inference_count"] == document[2]["execution_count"] == 0
    assert [len(request.inputs[0].data) for request in found.candidate.asked] == [1, 1, 1]


async def test_pairs_ask_the_baseline_too_outside_of_its_statistics(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(1.0, pair=True)
    assert (await found.ask()).model_version == 2
    counts = await ended(found, 1)
    assert (counts.compared, counts.disagreed) == (1, 1)
    assert counts.candidate.requests == 1
    assert found.manager.get("m", 1).statistics.inference_count == 0
    [example] = found.rollouts.examples("m")
    assert example["outputs"][0]["data"] == [2.0, 4.0]
    assert example["candidate_outputs"][0]["data"] == [3.0, 6.0]


async def test_a_baseline_that_fails_on_a_pair_is_not_the_candidates_failure(
    tmp_path: Path,
) -> None:
    found = await sides(tmp_path, times(3))
    found.baseline.answer = failing(Internal("broken"))
    found.apply(1.0, pair=True)
    await found.ask()
    for _ in range(50):
        await asyncio.sleep(0)
    counts = found.counts()
    assert (counts.failed, counts.compared, counts.disagreed) == (0, 0, 0)


async def test_outputs_are_compared_before_their_classification(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(2))
    found.apply(1.0, "shadow")
    answer = await found.ask(classification={"y": 1})
    assert answer.outputs[0].data.tolist() == [[b"4.000000:1:dog"]]
    counts = await ended(found, 1)
    assert (counts.compared, counts.disagreed) == (1, 0)


async def test_a_batch_counts_by_the_share_of_its_rows(tmp_path: Path) -> None:
    async def one_of_four(request: InferRequest) -> InferResponse:
        data = request.inputs[0].data * np.float32(2)
        data[0] = data[0, ::-1]
        return InferResponse("m", 2, [Tensor("y", Datatype.FP32, data)])

    found = await sides(tmp_path, one_of_four)
    found.apply(1.0, "shadow", comparison=ComparisonKind.DECISIONS)
    data = np.tile(np.array([1, 2], np.float32), (4, 1))
    for number in range(200):
        request = InferRequest("m", [Tensor("x", Datatype.FP32, data)])
        await finished(found.rollouts.infer(request, shadow.Deadline()))
        await ended(found, number + 1)
    counts = found.counts()
    assert counts.compared == 200
    assert 20 < counts.disagreed < 85
    assert sum(counts.baseline.scores.values()) == sum(counts.candidate.scores.values()) == 800


async def test_the_tolerance_of_the_plan_decides(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(2.001))
    for limits, disagreed in ((RolloutLimits(rtol=0.01), 0), (RolloutLimits(rtol=1e-5), 1)):
        found.apply(1.0, "shadow", limits=limits)
        await found.ask()
        counts = await ended(found, 1)
        assert (counts.compared, counts.disagreed) == (1, disagreed)


async def test_large_answers_are_compared_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "INLINE_ELEMENTS", 1)
    threads: list[Any] = []
    to_thread = asyncio.to_thread

    async def noted(work: Any, *arguments: Any) -> Any:
        threads.append(work)
        return await to_thread(work, *arguments)

    found = await sides(tmp_path, times(2))
    monkeypatch.setattr(asyncio, "to_thread", noted)
    found.apply(1.0, "shadow")
    await found.ask()
    assert (await ended(found, 1)).compared == 1
    assert len(threads) == 1
