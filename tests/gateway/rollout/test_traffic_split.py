"""Requests during a rollout: which side answers, what is counted, and the end of a rollout."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from modelport.gateway.errors import Internal, InvalidArgument, TimedOut, Unavailable
from modelport.gateway.rollout.plan import AssignmentKind
from modelport.gateway.rollout.statistics.latency_ranks import LEVELS
from modelport.gateway.rollout.traffic import traffic_split
from modelport.gateway.rollout.traffic.request_events import BLOCK
from modelport.gateway.rollout.traffic.request_routing import CURRENT, RequestRouting
from modelport.gateway.types import Deadline
from tests.gateway.rollout.sides import failing, never, sides, times


async def test_without_a_rollout_the_default_version_answers(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    assert (await found.ask()).model_version == 0  # as its backend says
    assert not found.candidate.asked


async def test_a_share_of_requests_without_a_version_goes_to_the_candidate(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(0.25)
    answers = [await found.ask() for _ in range(1000)]
    versions = [answer.model_version for answer in answers]
    assert {(a.model_version, a.outputs[0].data[0, 0]) for a in answers} == {(1, 2), (2, 3)}
    assert 150 < versions.count(2) < 350
    counts = found.counts()
    assert (counts.baseline.requests, counts.candidate.requests) == (
        versions.count(1),
        versions.count(2),
    )
    assert sum(counts.candidate.latency.values()) == versions.count(2)


@pytest.mark.parametrize("number", [1, 2])
async def test_a_request_that_names_a_version_is_not_diverted(tmp_path: Path, number: int) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(1.0 if number == 1 else 0.0)
    answer = await found.ask(model_version=number)
    assert answer.outputs[0].data[0, 0] == (2 if number == 1 else 3)
    assert found.counts().baseline.requests == found.counts().candidate.requests == 0


async def test_a_request_with_the_baselines_label_is_diverted_and_others_are_not(
    tmp_path: Path,
) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(1.0, label="stable")
    for label, number in (("stable", 2), ("", 2), ("other", 1), (None, 1)):
        answer = await found.ask(model_version=1, label=label)
        assert answer.outputs[0].data[0, 0] == number + 1, label


async def test_requests_without_a_version_stay_if_their_default_is_not_the_baseline(
    tmp_path: Path,
) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(1.0, label="stable", default_version=7)
    assert (await found.ask()).outputs[0].data[0, 0] == 2
    assert (await found.ask(model_version=1, label="stable")).outputs[0].data[0, 0] == 3


async def test_a_request_of_a_sequence_is_not_diverted(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(1.0)
    await found.ask(parameters={"sequence_id": 7})
    assert not found.candidate.asked


async def test_a_key_stays_on_its_side_as_the_share_grows(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    diverted: set[int] = set()
    for stage, share in enumerate((0.05, 0.25, 0.6, 1.0)):
        found.apply(share, stage=stage, assignment=AssignmentKind.PARAMETER, parameter="customer")
        now = set()
        for key in range(200):
            versions = {
                (await found.ask(parameters={"customer": key})).model_version for _ in range(2)
            }
            assert len(versions) == 1
            now |= {key} if versions == {2} else set()
        assert diverted <= now
        assert abs(len(now) / 200 - share) < 0.12
        diverted = now


async def test_requests_without_a_key_are_assigned_at_random(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(0.5, assignment=AssignmentKind.HEADER)
    assert {(await found.ask()).model_version for _ in range(100)} == {1, 2}


async def test_the_route_key_of_the_task_decides(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(0.5, assignment=AssignmentKind.HEADER)
    routing = RequestRouting(b"customer 1")
    CURRENT.set(routing)
    versions = {(await found.ask()).model_version for _ in range(50)}
    assert len(versions) == 1
    assert routing.answered == str(versions.pop())


async def test_a_step_of_an_ensemble_is_diverted_and_says_nothing_to_the_client(
    tmp_path: Path,
) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(1.0)
    CURRENT.set(routing := RequestRouting())
    answer = await found.ask(step=True)
    assert (answer.model_version, routing.answered) == (2, "")


async def test_a_candidates_failure_is_counted_and_the_baseline_answers(tmp_path: Path) -> None:
    found = await sides(tmp_path, failing(Internal("broken")))
    found.apply(1.0)
    CURRENT.set(routing := RequestRouting())
    answer = await found.ask(id="mine")
    assert (answer.model_version, answer.id, routing.answered) == (1, "mine", "1")
    counts = found.counts()
    assert (counts.candidate.requests, counts.candidate.errors) == (1, 1)
    assert counts.baseline.requests == 0  # it was not assigned there


async def test_a_candidate_that_is_gone_harms_no_request(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(1.0)
    await found.manager.unload_version("m", 2)
    assert (await found.ask()).model_version == 1
    assert found.counts().candidate.errors == 1


async def test_a_request_that_both_sides_refuse_is_nobodys_error(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    for share in (0.0, 1.0):
        found.apply(share)
        with pytest.raises(InvalidArgument, match="unexpected shape"):
            await found.ask(1, 2, 3)
    counts = found.counts()
    assert counts.errors.total == counts.baseline.requests + counts.candidate.requests == 0


async def test_a_request_that_the_candidate_alone_refuses_is_its_error(tmp_path: Path) -> None:
    found = await sides(tmp_path, failing(InvalidArgument("a token out of range")))
    found.apply(1.0)
    assert (await found.ask()).model_version == 1
    assert found.counts().candidate.errors == 1


async def test_the_baselines_failure_is_its_own(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    found.baseline.answer = failing(Unavailable("down"))
    found.apply(0.0)
    with pytest.raises(Unavailable, match="down"):
        await found.ask()
    counts = found.counts()
    assert (counts.errors.candidate, counts.errors.total) == (0, 1)


async def test_a_candidate_that_exceeds_the_deadline_has_failed(tmp_path: Path) -> None:
    found = await sides(tmp_path, never)
    found.apply(1.0)
    with pytest.raises(TimedOut):
        await found.ask(deadline=Deadline.after(0.02))
    assert found.counts().candidate.errors == 1


async def test_after_a_stop_no_request_reaches_the_candidate(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    found.apply(1.0)
    await found.ask()
    found.apply(0.0)
    for _ in range(100):
        assert (await found.ask()).model_version == 1
    assert len(found.candidate.asked) == 1


async def test_after_its_lease_no_request_reaches_the_candidate_although_no_timer_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr(traffic_split, "time", SimpleNamespace(monotonic=lambda: clock))
    found = await sides(tmp_path, times(3))
    found.apply(1.0, until=1010.0)
    assert (await found.ask()).model_version == 2
    clock = 1010.0
    assert (await found.ask()).model_version == 1
    found.apply(1.0, until=1020.0)  # renewed
    assert (await found.ask()).model_version == 2
    found.apply(1.0, "shadow", until=1010.0)
    await found.ask()
    await asyncio.sleep(0)
    assert len(found.candidate.asked) == 2


async def test_a_request_in_flight_at_a_stop_finishes_at_the_candidate(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    reached, finish = asyncio.Event(), asyncio.Event()

    async def slow(request: object) -> object:
        reached.set()
        await finish.wait()
        return await times(3)(request)  # type: ignore[arg-type]

    found.candidate.answer = slow  # type: ignore[assignment]
    found.apply(1.0)
    task = asyncio.create_task(found.ask())
    await reached.wait()
    found.apply(0.0)
    finish.set()
    assert (await task).model_version == 2
    assert found.counts().candidate.requests == 1


@pytest.mark.parametrize("deadline", [None, 60.0])
async def test_a_request_that_hangs_at_a_stopped_candidate_is_answered_by_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline: float | None
) -> None:
    monkeypatch.setattr(traffic_split, "STOP_SECONDS", 0.01)
    found = await sides(tmp_path, never)
    found.apply(1.0)
    limit = Deadline() if deadline is None else Deadline.after(deadline)
    tasks = [asyncio.create_task(found.ask(deadline=limit)) for _ in range(3)]
    async with asyncio.timeout(60):
        while len(found.candidate.asked) < 3:
            await asyncio.sleep(0)
        found.apply(0.0)
        answers = await asyncio.gather(*tasks)
    assert [answer.model_version for answer in answers] == [1, 1, 1]
    version = found.manager.get("m", 2)
    assert (version.in_flight, version.statistics.pending) == (0, 0)


async def test_a_client_that_disconnects_leaves_nothing(tmp_path: Path) -> None:
    found = await sides(tmp_path, never)
    found.apply(1.0)
    task = asyncio.create_task(found.ask())
    async with asyncio.timeout(60):
        while not found.candidate.asked:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert found.manager.get("m", 2).in_flight == 0
    assert found.manager.get("m", 2).statistics.failures["CANCELED"] == 1
    assert found.counts().candidate.errors == 0
    assert not found.baseline.asked


async def test_counts_are_kept_by_stage_and_forgotten_with_the_rollout(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    for stage in range(2):
        found.apply(1.0, stage=stage)
        await found.ask()
        assert found.counts(stage).candidate.requests == 1
    found.rollouts.remove("m")
    assert found.rollouts.counts() == {}
    await found.ask()
    assert len(found.candidate.asked) == 2
    assert found.rollouts.splits == {}


async def test_limits_in_milliseconds_are_counted_per_side(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    limits = found.plan.limits
    plan = {"limits": type(limits)(p50_ms=0.0, p99_ms=60_000.0)}
    found.apply(1.0, **plan)
    await found.ask()
    assert found.counts().candidate.over_limit == {"p50_ms": 1}


async def test_a_hanging_candidate_is_slow_when_its_clients_leave(tmp_path: Path) -> None:
    found = await sides(tmp_path, never)
    found.apply(0.0)
    for _ in range(BLOCK):
        await found.ask()
    found.apply(1.0)
    task = asyncio.create_task(found.ask())
    async with asyncio.timeout(60):
        while not found.candidate.asked:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)  # longer than the median of the baseline
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ranks = found.counts().ranks
    assert [each.candidate for rank, each in ranks.items() if rank > LEVELS.index(0.5)] == [1]
