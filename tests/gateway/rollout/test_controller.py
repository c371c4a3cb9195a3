"""Tests of the controller of rollouts, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from modelport.gateway.errors import AlreadyExists, InvalidArgument, NotFound, Unavailable
from modelport.gateway.rollout import controller as controllers
from modelport.gateway.rollout.shared_state import transitions
from modelport.gateway.rollout.shared_state.state import RolloutPhase
from modelport.gateway.rollout.shared_state.state_store import RolloutStore
from modelport.gateway.rollout.shared_state.transitions import RolloutCommand
from modelport.gateway.rollout.statistics.counts import StageCounts
from tests.gateway.rollout.plans import plan
from tests.gateway.rollout.simulation import (
    LEASE,
    REQUESTS,
    Network,
    SimulatedGateway,
    SimulatedProcesses,
    Storage,
    now,
    phases,
    run,
    until,
)
from tests.thorough import thorough

#: A part of all awaits at which a gateway can be killed.
STRIDE = 1 if os.environ.get("MODELPORT_SLOW_TESTS") else 7
QUICK = {"steps": (0.1, 1.0), "min_requests": 10, "min_seconds": 5.0}


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in virtual time."""

    @functools.wraps(test)
    def wrapped(**fixtures: Any) -> None:
        run(test(**fixtures))

    return wrapped


@virtual
async def test_a_rollout_without_harm_is_promoted_stage_by_stage_and_kept_in_the_history() -> None:
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    began = await gateway.controller.start(plan(**QUICK), by="ana")
    assert began.phase is RolloutPhase.RUNNING
    assert gateway.processes.routed["fraud"].share == 0.1
    await until(lambda: storage.state().settled, gateways=[gateway])
    shares = [routing.share for _, routing in gateway.processes.applied]
    assert shares == [0.1, 1.0, 1.0]
    assert [state.phase for state in gateway.processes.settled] == [RolloutPhase.PROMOTED]
    await until(lambda: bool(gateway.processes.removed))
    assert gateway.processes.routed == {}
    (ended,) = await gateway.controller.history("fraud")
    assert ended["phase"] == "promoted"
    assert ended["events"][0]["by"] == "ana"
    assert [stage["share"] for stage in ended["stages"]] == [0.1, 1.0]
    assert all(stage["ended"] - stage["began"] >= 5 for stage in ended["stages"])
    assert ended["counts"][0]["candidate"]["requests"] >= 10
    assert not [key for key in storage.files if key.startswith("counts/")]
    gateway.kill()


@virtual
async def test_a_bad_candidate_gets_nothing_more_before_the_state_says_so() -> None:
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    await gateway.controller.start(plan(**QUICK))
    gateway.processes.serve(10, errors=0.5)
    await until(lambda: phases(storage)[-1] is RolloutPhase.ROLLED_BACK)
    (stopped,) = [at for at, routing in gateway.processes.applied if not routing.share]
    (recorded,) = [at for at, state in storage.states if state.phase.ended and not state.settled]
    assert stopped < recorded
    await until(lambda: storage.state().settled)
    assert storage.state().events[-1].reason == "too many errors"
    gateway.kill()


@virtual
async def test_a_candidate_that_is_gone_is_rolled_back_with_the_reason() -> None:
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    await gateway.controller.start(plan(**QUICK))
    gateway.processes.problem = "version 3 has been removed"
    await until(lambda: storage.state().settled)
    assert "version 3 has been removed" in storage.state().events[-1].reason
    gateway.kill()


@virtual
async def test_the_status_of_a_stage_that_cannot_compare_says_why() -> None:
    gateway = SimulatedGateway(Storage(), 1)
    await gateway.controller.start(plan(shadow=0.1, **QUICK))
    assert gateway.controller.status("fraud")["problem"] == ""
    gateway.processes.uncompared = "the last 50 copies were dropped: the baseline is overloaded"
    assert gateway.controller.status("fraud")["problem"] == gateway.processes.uncompared
    gateway.kill()


@virtual
async def test_the_status_says_that_the_baseline_is_gone() -> None:
    gateway = SimulatedGateway(Storage(), 1)
    await gateway.controller.start(plan(**QUICK))
    gateway.processes.baseline_problem = "model 'fraud' no longer has version 2"
    await until(lambda: bool(gateway.controller.status("fraud")["problem"]))
    assert gateway.controller.status("fraud")["problem"] == (
        "the baseline can no longer be served: model 'fraud' no longer has version 2"
    )
    gateway.kill()


@pytest.mark.parametrize(
    "error", [Unavailable("No space left on device"), InvalidArgument("Read-only file system")]
)
@virtual
async def test_a_command_that_cannot_be_recorded_says_what_was_applied(error: Exception) -> None:
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    gateway.network.full = error
    with pytest.raises(type(error), match=str(error)):
        await gateway.controller.start(plan(**QUICK))
    gateway.network.full = None
    await gateway.controller.start(plan(**QUICK))
    gateway.network.full = error
    for command in (RolloutCommand.PAUSE, RolloutCommand.PROMOTE):
        with pytest.raises(type(error)) as refused:
            await gateway.controller.command("fraud", command)
        assert str(refused.value) == (
            f"nothing has changed, because '{command}' cannot be recorded: {error}"
        )
    assert gateway.controller.status("fraud")["problem"] == (
        f"the state cannot be recorded: {error}"
    )
    assert gateway.processes.routed["fraud"].share == 0.1
    with pytest.raises(type(error), match=r"^this gateway sends nothing to the candidate any more"):
        await gateway.controller.command("fraud", RolloutCommand.ROLLBACK)
    assert gateway.processes.routed["fraud"].share == 0
    assert gateway.controller.status("fraud")["problem"].startswith(
        "a rollback is applied to this gateway, but the state cannot be recorded: "
    )
    gateway.network.full = None
    await until(lambda: storage.state().settled)
    assert storage.state().phase is RolloutPhase.ROLLED_BACK
    assert gateway.controller.status("fraud")["problem"] == ""
    gateway.kill()


@pytest.mark.parametrize("quick", [True, False], ids=["", "known-bad: no glances"])
@virtual
async def test_another_gateway_follows_a_rollback_at_its_next_glance(quick: bool) -> None:
    late = []
    for seed in range(10):
        storage = Storage()

        class SharedFolder(Network):
            is_quick = quick

        gateways = [SimulatedGateway(storage, 100 * seed + n, network=SharedFolder) for n in (1, 2)]
        await gateways[0].controller.start(plan(**QUICK))
        other = gateways[1].processes
        await until(lambda: "fraud" in other.routed and other.routed["fraud"].share > 0)  # noqa: B023
        await asyncio.sleep(1 + 0.1 * seed)
        await gateways[0].controller.command("fraud", RolloutCommand.ROLLBACK)
        began = now()
        while other.diverted:
            await asyncio.sleep(0.01)
        late.append(now() - began)
        for gateway in gateways:
            gateway.kill()
    assert (max(late) < controllers.GLANCE_SECONDS + 0.1) is quick


async def lost_by_a_kill(store: Callable[..., RolloutStore] = RolloutStore) -> list[float]:
    """Requests of each stage that a kill loses; the stage and its time stay."""
    storage = Storage()
    gateway = SimulatedGateway(storage, 1, store=store)
    await gateway.controller.start(plan(steps=(0.1, 0.5, 1.0), min_requests=500, min_seconds=5.0))
    await until(lambda: storage.state().stage == 1, gateways=[gateway])
    await until(lambda: storage.state().seconds > 3, gateways=[gateway])
    before = gateway.controller.status("fraud")
    gateway.kill()
    gateway.live()
    await until(lambda: "fraud" in gateway.processes.routed)
    assert gateway.processes.routed["fraud"].share == 0.5
    await until(lambda: storage.state().leader == gateway.controller.replica)
    after = gateway.controller.status("fraud")
    gateway.kill()
    assert after["stage"] == 1
    assert after["seconds"] >= 3
    requests = [
        [each["candidate"]["requests"] for each in one["counts"]] for one in (before, after)
    ]
    return [one - other for one, other in zip(*requests, strict=True)]


@virtual
async def test_after_a_kill_the_stage_goes_on_with_the_counts_of_a_second_ago() -> None:
    lost = await lost_by_a_kill()
    assert lost[0] == 0
    assert 0 <= lost[1] <= 0.5 * REQUESTS


@virtual
async def test_a_gateway_that_forgets_its_earlier_life_is_caught() -> None:
    class Forgetful(RolloutStore):
        async def read_counts(self, *args: Any) -> dict[int, StageCounts]:
            return {}

    assert max(await lost_by_a_kill(Forgetful)) > 0.5 * REQUESTS


@virtual
async def test_of_two_starters_one_wins_and_the_other_is_told() -> None:
    storage = Storage()
    gateways = [SimulatedGateway(storage, seed) for seed in range(5)]
    results = await asyncio.gather(
        *(each.controller.start(plan(**QUICK)) for each in gateways), return_exceptions=True
    )
    refused = [each for each in results if isinstance(each, AlreadyExists)]
    assert len(refused) == 4, results
    assert "a rollout of 'fraud' is running already (version 3, stage 1 of 2" in str(refused[0])
    for gateway in gateways:
        gateway.kill()


@virtual
async def test_of_two_who_promote_at_once_none_skips_a_stage() -> None:
    storage, ready = Storage(), asyncio.Barrier(2)
    gateways = [SimulatedGateway(storage, seed) for seed in range(2)]
    await gateways[0].controller.start(plan(steps=(0.1, 0.2, 0.3), min_requests=10**9))
    for gateway in gateways:
        create, waited = gateway.network.create, list[str]()

        async def together(
            key: str, content: bytes, create: Any = create, waited: list[str] = waited
        ) -> bool:
            if b"advanced" in content and not waited:
                waited.append(key)
                await ready.wait()
            return bool(await create(key, content))

        gateway.network.create = together  # type: ignore[method-assign]
    commands = (each.controller.command("fraud", RolloutCommand.PROMOTE) for each in gateways)
    assert [each.stage for each in await asyncio.gather(*commands)] == [1, 1]
    assert storage.state().stage == 1
    state = await gateways[0].controller.command("fraud", RolloutCommand.PROMOTE)
    assert state.stage == 2
    for gateway in gateways:
        gateway.kill()


@virtual
async def test_any_gateway_takes_commands() -> None:
    storage = Storage()
    one, two = SimulatedGateway(storage, 1), SimulatedGateway(storage, 2)
    await one.controller.start(plan(**QUICK))
    await two.controller.command("fraud", RolloutCommand.PAUSE, "lunch", "ana")
    assert storage.state().phase is RolloutPhase.PAUSED
    assert storage.state().leader == two.controller.replica
    await asyncio.sleep(100)
    assert one.controller.status("fraud")["phase"] == "paused"
    with pytest.raises(InvalidArgument, match="is paused, not running"):
        await one.controller.command("fraud", RolloutCommand.PAUSE)
    await one.controller.command("fraud", RolloutCommand.RESUME)
    assert (await one.controller.command("fraud", RolloutCommand.PROMOTE)).stage == 1
    await two.controller.command("fraud", RolloutCommand.ROLLBACK, "a bad feeling", "bob")
    assert two.processes.diverted == {}
    event = storage.state().events[-1]
    assert (event.reason, event.by) == ("a bad feeling", "bob")
    with pytest.raises(InvalidArgument, match="is rolled back; it has ended"):
        await two.controller.command("fraud", RolloutCommand.PROMOTE)
    with pytest.raises(NotFound, match="has had no rollout"):
        await two.controller.command("other", RolloutCommand.PAUSE)
    await until(lambda: not one.processes.routed)
    one.kill()
    two.kill()


@virtual
async def test_a_rollback_stops_the_traffic_though_the_store_is_unreachable() -> None:
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    await gateway.controller.start(plan(**QUICK))
    gateway.network.partitioned = True
    with pytest.raises(Unavailable):
        await gateway.controller.command("fraud", RolloutCommand.ROLLBACK)
    assert gateway.processes.diverted == {}
    gateway.network.partitioned = False
    await until(lambda: storage.state().phase is RolloutPhase.ROLLED_BACK)
    assert [routing.share for _, routing in gateway.processes.applied] == [0.1, 0.0]
    gateway.kill()


@virtual
async def test_an_undecided_stage_is_paused_and_its_time_begins_again_when_resumed() -> None:
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    await gateway.controller.start(plan(**QUICK, max_seconds=20.0))
    await until(lambda: storage.state().phase is RolloutPhase.PAUSED)
    assert storage.state().events[-1].reason == "more requests are missing"
    assert storage.state().seconds >= 20
    resumed = await gateway.controller.command("fraud", RolloutCommand.RESUME)
    assert resumed.seconds == 0
    gateway.kill()


@virtual
async def test_another_gateway_takes_over_from_a_dead_leader() -> None:
    storage = Storage()
    one, two = SimulatedGateway(storage, 1), SimulatedGateway(storage, 2)
    await one.controller.start(plan(**QUICK))
    await until(lambda: bool(two.processes.diverted), gateways=[one, two])
    one.kill()
    died = now()
    await until(lambda: storage.state().leader == two.controller.replica)
    assert 8 < now() - died < 13
    await until(lambda: storage.state().settled, gateways=[two])
    two.kill()


@virtual
async def test_a_leader_that_stops_leaves_the_lead_at_once() -> None:
    storage = Storage()
    one, two = SimulatedGateway(storage, 1), SimulatedGateway(storage, 2)
    await one.controller.start(plan(**QUICK))
    await until(lambda: bool(two.processes.diverted), gateways=[one, two])
    await one.controller.stop()
    stopped = now()
    await until(lambda: storage.state().leader == two.controller.replica)
    assert now() - stopped < 2
    two.kill()


@virtual
async def test_a_gateway_without_the_store_diverts_nothing_until_it_is_back() -> None:
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    await gateway.controller.start(plan(**QUICK))
    gateway.network.partitioned = True
    left = now()
    await until(lambda: not gateway.processes.diverted)
    assert now() - left < 10
    assert gateway.controller.status("fraud")["problem"] == "the state is out of date"
    gateway.network.partitioned = False
    await until(lambda: bool(gateway.processes.diverted))
    gateway.kill()


@virtual
async def test_a_promotion_that_the_configuration_cannot_hold_goes_on_until_it_is_undone() -> None:
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    gateway.processes.unsettled_reason = "the repository is read-only"
    await gateway.controller.start(plan(**QUICK))
    await gateway.controller.command("fraud", RolloutCommand.PROMOTE)
    await gateway.controller.command("fraud", RolloutCommand.PROMOTE)
    await until(lambda: storage.state().settled)
    gateway.network.partitioned = True
    await asyncio.sleep(100)
    assert gateway.processes.routed["fraud"].share == 1.0
    gateway.network.partitioned = False
    with pytest.raises(AlreadyExists, match="the repository is read-only"):
        await gateway.controller.start(plan(**QUICK))
    gateway.processes.unsettled_reason = ""
    await gateway.controller.command("fraud", RolloutCommand.ROLLBACK)
    assert gateway.processes.routed["fraud"].share == 0.0
    await until(lambda: storage.state().settled and not gateway.processes.routed)
    (ended,) = await gateway.controller.history("fraud")
    assert ended["phase"] == "rolled back"
    gateway.kill()


@pytest.mark.parametrize("killed", [False, True])
@virtual
async def test_right_after_an_end_another_rollout_begins_at_any_gateway(killed: bool) -> None:
    storage = Storage()
    one, two = SimulatedGateway(storage, 1), SimulatedGateway(storage, 2)
    await one.controller.start(plan(**QUICK))
    await until(lambda: "fraud" in two.processes.routed)
    for _ in range(2):
        await one.controller.command("fraud", RolloutCommand.PROMOTE)
    if killed:
        one.kill()
    assert storage.state().needs_leader
    began = now()
    await two.controller.over("fraud")
    assert (now() - began > LEASE / 2) is killed
    new = await two.controller.start(plan(**QUICK))
    assert storage.state() == new
    assert [state.phase for state in two.processes.removed] == [RolloutPhase.PROMOTED]
    one.kill()
    two.kill()


@virtual
async def test_a_rollback_right_after_a_promotion_waits_until_its_outcome_is_settled() -> None:
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    gateway.processes.unsettled_reason = "the repository is read-only"
    await gateway.controller.start(plan(steps=(1.0,)))
    await gateway.controller.command("fraud", RolloutCommand.PROMOTE)
    assert not storage.state().settled
    state = await gateway.controller.command("fraud", RolloutCommand.ROLLBACK)
    assert state.phase is RolloutPhase.ROLLED_BACK
    gateway.kill()


async def promoted_by_a_late_write() -> int:
    """Number of times a promotion counts whose write is done only when it is tried again."""
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    await gateway.controller.start(plan(steps=(0.1, 0.2, 0.3)))
    create, waiting = gateway.network.create, list[tuple[str, bytes]]()

    async def late(key: str, content: bytes) -> bool:
        if b"go on" in content and not waiting:
            waiting.append((key, content))
            raise Unavailable("too slow")
        for each in waiting:
            gateway.network.create_now(*each)
        return await create(key, content)

    gateway.network.create = late  # type: ignore[method-assign]
    with contextlib.suppress(InvalidArgument):  # the broken variant goes on to the end
        await gateway.controller.command("fraud", RolloutCommand.PROMOTE, "go on")
    gateway.kill()
    return [event.reason for event in storage.state().events].count("go on")


@virtual
async def test_a_command_whose_answer_was_lost_is_carried_out_once() -> None:
    assert await promoted_by_a_late_write() == 1


@virtual
async def test_a_command_that_is_repeated_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transitions, "done", lambda *_: False)
    assert await promoted_by_a_late_write() > 1


async def killed_at(step: int, errors: float) -> bool:
    """Kill a gateway at its ``step``-th await, and begin again; whether it got so far.

    In the end the rollout is what it would have been without that.
    """
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    steps, killed = itertools.count(1), False

    async def counted(self: Network | SimulatedProcesses) -> None:
        nonlocal killed
        if not killed and next(steps) == step:
            killed = True
            gateway.kill()
        if self.dead:
            await asyncio.Event().wait()
        await asyncio.sleep(0.001)

    wanted = plan(steps=(0.5, 1.0), min_requests=20, min_seconds=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedProcesses, "_step", counted)
        patch.setattr(Network, "_step", counted)
        starts = [asyncio.create_task(gateway.controller.start(wanted))]
        for _ in range(10_000):
            await asyncio.sleep(0.01)
            gateway.processes.serve(0.05, errors)
            rolled_back = phases(storage)[-1:] == [RolloutPhase.ROLLED_BACK]
            assert not (rolled_back and gateway.alive and gateway.processes.diverted)
            if not gateway.alive:
                gateway.live()
                if not storage.states:  # the person tries again
                    starts.append(asyncio.create_task(gateway.controller.start(wanted)))
            elif storage.states and storage.state().settled and not gateway.processes.routed:
                break
        else:
            raise AssertionError(f"killed at {step}: it never ended")
    gateway.kill()
    for start in starts:
        start.cancel()
    assert storage.state().phase is (RolloutPhase.ROLLED_BACK if errors else RolloutPhase.PROMOTED)
    return killed


@pytest.mark.parametrize("errors", [thorough(0.0), 0.5])
def test_a_gateway_that_is_killed_at_any_await_comes_to_the_same_end(errors: float) -> None:
    step = 1
    while run(killed_at(step, errors)):
        step += STRIDE
    assert step > 50


@virtual
async def test_a_state_that_cannot_be_read_stops_the_rollout_and_is_named() -> None:
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    began = await gateway.controller.start(plan(**QUICK))
    key = f"state/fraud/{began.revision + 20:010d}.json"
    storage.files[key], storage.changes[key] = b"{}", 1
    await until(lambda: not gateway.processes.diverted)
    assert key in gateway.controller.status("fraud")["problem"]
    for attempt in (
        gateway.controller.start(plan(**QUICK)),
        gateway.controller.command("fraud", RolloutCommand.PROMOTE),
    ):
        with pytest.raises(InvalidArgument, match="is not the state of a rollout"):
            await attempt
    del storage.files[key]
    await until(lambda: bool(gateway.processes.diverted))
    storage.files["state/other/0000000001.json"] = b"{}"
    storage.changes["state/other/0000000001.json"] = 1
    await asyncio.sleep(10)
    with pytest.raises(InvalidArgument, match="state/other"):
        gateway.controller.status("other")
    assert gateway.processes.diverted
    gateway.kill()


@virtual
async def test_a_rollout_whose_state_is_removed_is_forgotten() -> None:
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    await gateway.controller.start(plan(**QUICK))
    storage.files.clear()
    await until(lambda: not gateway.processes.routed)
    with pytest.raises(NotFound):
        gateway.controller.status("fraud")
    assert (await gateway.controller.start(plan(**QUICK))).revision == 1
    gateway.kill()


@virtual
async def test_counts_are_stored_within_a_second_of_a_start_after_a_long_pause() -> None:
    storage = Storage()
    gateway = SimulatedGateway(storage, 1)
    await asyncio.sleep(61.5)  # between two looks at the store
    await gateway.controller.start(plan(**QUICK))
    gateway.processes.serve(1.0, 0.0)
    await asyncio.sleep(1.0)
    assert any(name.startswith("counts/") for name in storage.files)
    gateway.kill()


@virtual
async def test_a_gateway_that_has_not_loaded_the_candidate_yet_does_not_roll_back() -> None:
    storage = Storage()
    gateways = [SimulatedGateway(storage, number) for number in (1, 2)]
    await gateways[0].controller.start(plan(**QUICK))
    processes = gateways[1].processes
    load = processes.apply

    async def apply(routing: Any) -> None:
        await asyncio.sleep(2.0)
        await load(routing)
        processes.problem = ""

    processes.problem, processes.apply = "it is not loaded", apply  # type: ignore[method-assign]
    await until(lambda: "fraud" in processes.routed)
    await asyncio.sleep(3.0)
    assert storage.state().phase is RolloutPhase.RUNNING
    for gateway in gateways:
        gateway.kill()
