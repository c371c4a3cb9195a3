"""Safety of rollouts: gateways that fail at random keep to one decision and one stage.

Each property has a variant of the code that breaks it; the same check must catch that.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from modelport.gateway.errors import AlreadyExists, InvalidArgument, NotFound, Unavailable
from modelport.gateway.rollout import lease
from modelport.gateway.rollout.controller import RolloutController
from modelport.gateway.rollout.shared_state import transitions
from modelport.gateway.rollout.shared_state.replicated_rollout import ReplicatedRollout
from modelport.gateway.rollout.shared_state.state import RolloutPhase, RolloutState
from modelport.gateway.rollout.shared_state.transitions import Change, RolloutCommand
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.rollout.statistics.decision import RolloutVerdict
from tests.gateway.rollout.plans import plan
from tests.gateway.rollout.simulation import (
    LEASE,
    STEP,
    Network,
    SimulatedGateway,
    Storage,
    now,
    run,
)

SEEDS = 1000 if os.environ.get("MODELPORT_SLOW_TESTS") else 8
#: Seeds within which every broken variant is caught.
BROKEN_SEEDS = 500
MODEL = "fraud"


class Violation(AssertionError):
    """A safety property does not hold."""


class Observer:
    """Checks the properties while it serves requests at all gateways."""

    def __init__(self, storage: Storage, gateways: list[SimulatedGateway]) -> None:
        self.storage = storage
        self.gateways = gateways
        self.errors = 0.0
        self.checked = 0
        #: Since when two gateways have different stages.
        self.apart: dict[tuple[int, int], float] = {}
        self.rolled_back: dict[str, float] = {}
        self.highest: dict[str, int] = {}
        #: The counts of lives that ended, by rollout.
        self.served: Counter[str] = Counter()

    async def watch(self, seconds: float) -> None:
        """Let time pass."""
        end = now() + seconds
        while now() < end:
            await asyncio.sleep(STEP)
            for gateway in self.gateways:
                gateway.processes.serve(STEP, self.errors)
            self.check()

    def check(self) -> None:
        for at, state in self.storage.states[self.checked :]:
            self.check_state(at, state)
        self.checked = len(self.storage.states)
        diverted = [each.processes.diverted.get(MODEL) for each in self.gateways]
        for index, found in enumerate(diverted):
            if found is None or not self.gateways[index].alive:
                continue
            rollout, stage = found
            if stage > self.highest.get(rollout, -1):
                raise Violation("a gateway is in a stage that no state has had")
            if now() > self.rolled_back.get(rollout, now()) + LEASE:
                raise Violation("a gateway diverts after a rollback")
        for one, two in itertools.combinations(range(len(diverted)), 2):
            both = diverted[one], diverted[two]
            alive = self.gateways[one].alive and self.gateways[two].alive
            if None in both or both[0] == both[1] or not alive:
                self.apart.pop((one, two), None)
            elif now() - self.apart.setdefault((one, two), now()) > LEASE:
                raise Violation("two gateways are in different stages for longer than the lease")

    def check_state(self, at: float, state: RolloutState) -> None:
        rollout = state.plan.id
        self.highest[rollout] = max(self.highest.get(rollout, -1), state.stage)
        if len(set(state.events)) < len(state.events):
            raise Violation("a command was carried out twice")
        before = [each for _, each in self.storage.states if each.revision < state.revision]
        if before:
            self.check_step(before[-1], state)
        if state.counts:
            recorded = [StageCounts.from_json(each).candidate.requests for each in state.counts]
            if sum(recorded) > self.served_by_candidate(rollout):
                raise Violation("requests were counted twice")

    def check_step(self, before: RolloutState, state: RolloutState) -> None:
        if before.plan.id != state.plan.id:
            if before.needs_leader or state.plan.id in {
                each.plan.id for _, each in self.storage.states if each.revision < state.revision
            }:
                raise Violation("a rollout began while another was running")
            return
        if before.phase.ended and before.phase is not state.phase:
            raise Violation("a rollout was decided twice")
        if (
            not 0 <= state.stage - before.stage <= 1
            or before.events != state.events[: len(before.events)]
        ):
            raise Violation("a state does not follow from the one before")

    def served_by_candidate(self, rollout: str) -> int:
        found = self.served[rollout]
        for gateway in self.gateways:
            for counts in gateway.processes.counts.get(rollout, {}).values():
                found += counts.candidate.requests
        return found

    def kill(self, gateway: SimulatedGateway) -> None:
        gateway.kill()
        for rollout, stages in gateway.processes.counts.items():
            self.served[rollout] += sum(each.candidate.requests for each in stages.values())
        gateway.processes.counts = {}

    def note_write(self, write: Callable[[str, bytes], None], key: str, content: bytes) -> None:
        """Check a rollback at the moment of its record: its gateway has stopped before."""
        known = len(self.storage.states)
        write(key, content)
        for at, state in self.storage.states[known:]:
            rollout = state.plan.id
            if state.phase is RolloutPhase.ROLLED_BACK and rollout not in self.rolled_back:
                self.rolled_back[rollout] = at
                for gateway in self.gateways:
                    found = gateway.processes.diverted.get(MODEL)
                    writer = gateway.alive and gateway.controller.replica == state.leader
                    if writer and found is not None and found[0] == rollout:
                        raise Violation("a rollback was recorded before it was applied")


class People:
    """People who give commands to gateways, and remember what they were told."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        #: Rollouts by what their starters were told.
        self.started: set[str] = set()
        self.refused: set[str] = set()
        self.acknowledged: list[tuple[str, RolloutCommand, str]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.failed: list[BaseException] = []

    async def start(self, gateway: SimulatedGateway) -> None:
        wanted = plan(
            MODEL,
            id=f"{self.chance.getrandbits(128):032x}",
            steps=(0.1, 0.3, 1.0),
            min_requests=50,
            min_seconds=self.chance.choice((1.0, 6.0)),
            max_seconds=30.0,
        )
        try:
            await gateway.controller.start(wanted)
            self.started.add(wanted.id)
        except AlreadyExists:
            self.refused.add(wanted.id)
        except (Unavailable, InvalidArgument):
            pass

    async def command(self, gateway: SimulatedGateway) -> None:
        verbs = list(RolloutCommand)
        command = self.chance.choices(verbs, (2, 2, 2, 1))[0]
        reason = f"{self.chance.getrandbits(64):x}"
        try:
            state = await gateway.controller.command(MODEL, command, reason)
            self.acknowledged.append((state.plan.id, command, reason))
        except (Unavailable, InvalidArgument, NotFound):
            pass

    def ask(self, gateway: SimulatedGateway) -> None:
        if gateway.alive:
            ask = self.command if self.chance.random() < 0.7 else self.start
            self.tasks.append(asyncio.create_task(ask(gateway)))


async def life(seed: int, **options: Any) -> None:
    """Two minutes of faults, and their end: every rollout ends, and all gateways agree."""
    chance = random.Random(seed)
    storage = Storage()
    gateways = [SimulatedGateway(storage, chance.getrandbits(32), **options) for _ in range(3)]
    observer, people = Observer(storage, gateways), People(chance)
    write, failed = storage.write, asyncio.get_running_loop().create_future()

    def noted(key: str, content: bytes) -> None:
        try:
            observer.note_write(write, key, content)
        except Violation as violation:
            if not failed.done():
                failed.set_exception(violation)

    storage.write = noted  # type: ignore[method-assign]
    people.tasks.append(asyncio.create_task(people.start(gateways[0])))
    for _ in range(60):
        await observer.watch(chance.uniform(0.2, 4.0))
        if failed.done():
            break
        disturb(chance, observer, people)
    observer.errors = 0.0
    while any(gateway.network.frozen for gateway in gateways):
        await observer.watch(1.0)
    for gateway in gateways:
        recover(gateway, observer)
    for _ in range(40):
        await observer.watch(10.0)
        over = storage.states and not storage.state().needs_leader
        if failed.done() or (over and not any(each.processes.routed for each in gateways)):
            break
        if storage.states and storage.state().phase is RolloutPhase.PAUSED:
            people.tasks.append(asyncio.create_task(people.command(gateways[0])))
    else:
        raise Violation("the gateways do not come to an end")
    await finish(gateways, people, failed)
    check_promises(storage, people)


def disturb(chance: random.Random, observer: Observer, people: People) -> None:
    """One fault, recovery or command."""
    gateway = chance.choice(observer.gateways)
    network, kind = gateway.network, chance.randrange(13)
    if kind <= 2:
        people.ask(gateway)
    elif kind <= 4 and gateway.alive:
        observer.kill(gateway)
    elif kind == 5 and gateway.alive:
        network.partitioned = True
        gateway.skew -= chance.choice((0, 1000))  # someone sets the clock
    elif kind == 6:
        network.losing, network.late = chance.choice((0, 0.3)), chance.choice((0, 0.3))
        network.slow = chance.choice((0.01, 0.3, 2.0))
    elif kind == 7:
        gateway.processes.slow = chance.choice((0.01, 0.5))
    elif kind == 8 and chance.random() < 0.3:
        gateway.processes.problem = "it was removed"
    elif kind == 10 and gateway.alive and chance.random() < 0.5:
        seconds = chance.choice((1.0, 15.0, 70.0))
        people.tasks.append(asyncio.create_task(gateway.freeze(seconds)))
    elif kind == 9:
        observer.errors = chance.choice((0, 0, 0.02, 0.2))
    else:
        recover(gateway, observer)


def recover(gateway: SimulatedGateway, observer: Observer) -> None:
    network = gateway.network
    if network.frozen:
        return
    if not gateway.alive:
        gateway.live()
    network = gateway.network
    network.partitioned, network.losing, network.late, network.slow = False, 0.0, 0.0, 0.01
    gateway.processes.slow, gateway.processes.problem = 0.01, ""


async def finish(
    gateways: list[SimulatedGateway], people: People, failed: asyncio.Future[None]
) -> None:
    for gateway in gateways:
        gateway.kill()
    for task in people.tasks:
        task.cancel()
    told = await asyncio.gather(*people.tasks, return_exceptions=True)
    for error in told:
        if isinstance(error, Exception):
            raise error
    if failed.done():
        await failed
    failed.cancel()


def check_promises(storage: Storage, people: People) -> None:
    """Check that the last state keeps what people were told."""
    last = {state.plan.id: state for _, state in storage.states}
    if people.started - last.keys():
        raise Violation("a rollout that was started does not exist")
    if people.refused & last.keys():
        raise Violation("a rollout that was refused exists")
    for rollout, command, reason in people.acknowledged:
        if reason not in {event.reason for event in last[rollout].events}:
            raise Violation("a command that was acknowledged is not in the state")
        if command is RolloutCommand.ROLLBACK and (
            last[rollout].phase is not RolloutPhase.ROLLED_BACK
        ):
            raise Violation("a rollback that was acknowledged did not happen")


@pytest.mark.thorough
def test_gateways_that_fail_at_random_keep_to_one_state() -> None:
    for seed in range(SEEDS):
        try:
            run(life(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def caught(first: int = 0, **options: Any) -> set[str]:
    """The violation of a broken variant, by the seeds from ``first`` on, which saves time."""
    found: set[str] = set()
    for seed in range(first, first + BROKEN_SEEDS):
        try:
            run(life(seed, **options))
        except Violation as violation:
            found.add(str(violation))
            break
    return found


class LastWriterWins(Network):
    """Writes a revision though there is one."""

    def create_now(self, key: str, content: bytes) -> bool:
        self.storage.write(key, content)
        return True


class RecordsRollbacksFirst(RolloutController):
    """Records a rollback before the traffic stops."""

    async def _stop_at_once(self, model: str, command: RolloutCommand, change: Change) -> None:
        pass

    async def _judge(self, rollout: ReplicatedRollout) -> None:
        decision = self._decision(rollout)
        if self._leads(rollout) and decision.verdict is RolloutVerdict.ROLLBACK:
            change = Change(self._clock(), decision.reason)
            new = transitions.rolled_back(rollout.current, self.replica, change)
            await self._states.write(new)


class AppliesStagesFirst(RolloutController):
    """Applies a stage before it is recorded."""

    def _decided(self, rollout: ReplicatedRollout, state: RolloutState) -> RolloutState | None:
        new = super()._decided(rollout, state)
        if new is not None:
            rollout.state = new
        return new


@pytest.mark.thorough
def test_the_last_writer_winning_is_caught() -> None:
    assert caught(5, network=LastWriterWins)


@pytest.mark.thorough
def test_a_rollback_that_is_recorded_before_it_is_applied_is_caught() -> None:
    assert caught(kind=RecordsRollbacksFirst) == {"a rollback was recorded before it was applied"}


@pytest.mark.thorough
def test_a_stage_that_is_applied_before_it_is_recorded_is_caught() -> None:
    assert caught(31, kind=AppliesStagesFirst)


@pytest.mark.thorough
def test_a_lease_by_the_wall_clock_is_caught() -> None:
    assert caught(24, lease_by_wall_clock=True)


@pytest.mark.thorough
def test_a_gateway_that_goes_on_without_the_store_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease, "DOUBT", 1e9)
    assert caught()
