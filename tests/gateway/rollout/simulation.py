"""Gateways that share a store, in virtual time, with partitions, kills and lost answers.

Time passes only when nothing else is left to do, so that an hour takes seconds and each run is
determined by its seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from modelport.gateway.errors import NotFound, Unavailable
from modelport.gateway.rollout.controller import RolloutController
from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide, StageKind
from modelport.gateway.rollout.processes import ProcessCounts
from modelport.gateway.rollout.shared_state.state import (
    RolloutPhase,
    RolloutRouting,
    RolloutState,
    read_state,
)
from modelport.gateway.rollout.shared_state.state_store import RolloutStore
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.rollout.statistics.decision import RolloutDecision, RolloutVerdict
from tests.virtual_time import VirtualLoop

LEASE = 10.0
#: Requests per second of each gateway, and the errors of a bad candidate among 100 of its own.
REQUESTS = 200
STEP = 0.05
MAX_ERRORS = 20


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run ``main`` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def now() -> float:
    return asyncio.get_running_loop().time()


def decide(
    plan: RolloutPlan, stage: int, counts: Sequence[StageCounts], seconds: float
) -> RolloutDecision:
    """A decision that is simple to foresee."""
    if sum(each.candidate.errors for each in counts) >= MAX_ERRORS:
        return RolloutDecision(RolloutVerdict.ROLLBACK, "too many errors")
    if seconds >= plan.min_seconds and counts[stage].candidate.requests >= plan.min_requests:
        last = stage + 1 == len(plan.stages)
        verdict = RolloutVerdict.PROMOTE if last else RolloutVerdict.ADVANCE
        return RolloutDecision(verdict, "no harm was found")
    verdict = RolloutVerdict.PAUSE if seconds >= plan.max_seconds else RolloutVerdict.HOLD
    return RolloutDecision(verdict, "more requests are missing")


class Storage:
    """The files that all gateways share, and every state that was one."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.changes: dict[str, int] = {}
        #: Every state at the moment at which it became the latest of its model: time and state.
        self.states: list[tuple[float, RolloutState]] = []

    def write(self, key: str, content: bytes) -> None:
        if key.startswith("state/"):
            model, _, name = key.removeprefix("state/").partition("/")
            revision = int(name.removesuffix(".json"))
            if revision > self.latest(model):
                self.states.append((now(), read_state(content, model, revision)))
        self.files[key] = content
        self.changes[key] = self.changes.get(key, 0) + 1

    def latest(self, model: str) -> int:
        below = f"state/{model}/"
        names = (key.removeprefix(below) for key in self.files if key.startswith(below))
        return max((int(name.removesuffix(".json")) for name in names), default=0)

    def state(self, model: str = "fraud") -> RolloutState:
        """The latest state."""
        revision = self.latest(model)
        return read_state(self.files[f"state/{model}/{revision:010d}.json"], model, revision)


class Network:
    """``RolloutFiles`` of one gateway, over a network with faults."""

    is_quick = True

    def __init__(self, storage: Storage, chance: random.Random) -> None:
        self.storage = storage
        self.chance = chance
        self.partitioned = False
        self.dead = self.frozen = False
        #: The probability that an answer is lost, and that a write is done only later.
        self.losing = 0.0
        #: The error of every write.
        self.full: Exception | None = None
        self.late = 0.0
        self.slow = 0.01

    async def _step(self) -> None:
        await asyncio.sleep(self.chance.random() * self.slow)
        while self.frozen:
            await asyncio.sleep(STEP)
        if self.dead:
            await asyncio.Event().wait()
        if self.partitioned:
            await asyncio.sleep(self.chance.random())
            raise Unavailable("partitioned")

    async def _call(self, operation: Callable[[], Any], writes: bool = False) -> Any:
        await self._step()
        if writes and self.full is not None:
            raise self.full
        if writes and self.chance.random() < self.late:
            delay = self.chance.random() * 2 * LEASE
            asyncio.get_running_loop().call_later(delay, operation)
            raise Unavailable("too slow")
        found = operation()
        await self._step()
        if self.chance.random() < self.losing:
            raise Unavailable("the answer is lost")
        return found

    async def listing(self, below: str) -> Mapping[str, str]:
        prefix, storage = f"{below}/", self.storage
        return await self._call(
            lambda: {
                key.removeprefix(prefix): str(storage.changes[key])
                for key in storage.files
                if key.startswith(prefix)
            }
        )

    async def read(self, key: str, most: int) -> bytes:
        found = await self._call(lambda: self.storage.files.get(key))
        if found is None:
            raise NotFound(key)
        return found[:most]

    async def create(self, key: str, content: bytes) -> bool:
        return await self._call(lambda: self.create_now(key, content), writes=True)

    def create_now(self, key: str, content: bytes) -> bool:
        if key not in self.storage.files:
            self.storage.write(key, content)
        return self.storage.files[key] == content

    async def replace(self, key: str, content: bytes) -> None:
        await self._call(lambda: self.storage.write(key, content), writes=True)

    async def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        await self._call(lambda: [self.storage.files.pop(key, None) for key in wanted])


class SimulatedProcesses:
    """``RolloutProcesses`` that route simulated requests, and note every change of the routing."""

    def __init__(self, chance: random.Random, monotonic: Callable[[], float] = now) -> None:
        self.chance = chance
        self.monotonic = monotonic
        self.dead = self.frozen = False
        #: Until then the processes keep to ``until`` by themselves. Usually they need not, so that
        #: the controller must.
        self.careful = 0.0
        self.until: dict[str, float] = {}
        self.slow = 0.01
        self.problem = ""
        self.baseline_problem = self.uncompared = ""
        self.unsettled_reason = ""
        self.routed: dict[str, RolloutRouting] = {}
        self.counts: dict[str, dict[int, StageCounts]] = {}
        self.applied: list[tuple[float, RolloutRouting]] = []
        self.removed: list[RolloutState] = []
        self.settled: list[RolloutState] = []
        self.life = f"{chance.getrandbits(64):x}"

    async def _step(self) -> None:
        await asyncio.sleep(self.chance.random() * self.slow)
        while self.frozen:
            await asyncio.sleep(STEP)
        if self.dead:
            await asyncio.Event().wait()

    async def collect(self) -> Mapping[str, ProcessCounts]:
        await self._step()
        return {self.life: self.counts}

    def comparison_problem(self, rollout_id: str) -> str:
        return self.uncompared

    async def apply(self, routing: RolloutRouting) -> None:
        await self._step()
        self.routed[routing.plan.model] = routing
        self.until[routing.plan.model] = routing.until
        self.applied.append((now(), routing))
        await self._step()

    async def remove(self, state: RolloutState) -> None:
        await self._step()
        self.routed.pop(state.plan.model, None)
        self.removed.append(state)
        await self._step()

    def renew(self, model: str, until: float) -> None:
        self.until[model] = max(self.until[model], until)

    async def side_problem(self, side: RolloutSide) -> str:
        await self._step()
        return self.problem if side.version == 3 else self.baseline_problem

    async def settle(self, state: RolloutState) -> str:
        await self._step()
        self.settled.append(state)
        return self.unsettled_reason

    def serve(self, seconds: float, errors: float) -> None:
        """Answer the requests of some time, of which the candidate fails the share ``errors``."""
        if self.dead or self.frozen:
            return
        for routing in self.routed.values():
            stages = self.counts.setdefault(routing.plan.id, {})
            counts = stages.setdefault(routing.stage, StageCounts())
            mine = REQUESTS * seconds * (routing.share if routing.kind is StageKind.CANARY else 0)
            counts.candidate.requests += round(mine)
            counts.candidate.errors += round(mine * errors)
            counts.baseline.requests += round(REQUESTS * seconds - mine)

    @property
    def diverted(self) -> dict[str, tuple[str, int]]:
        """The rollout and the stage whose share goes to the candidate now, by model."""
        return {
            model: (each.plan.id, each.stage)
            for model, each in self.routed.items()
            if each.share and (now() > self.careful or self.monotonic() < self.until[model])
        }


class SimulatedGateway:
    """A gateway whose lives end by ``kill``, of which nothing runs afterwards."""

    def __init__(self, storage: Storage, seed: int, **options: Any) -> None:
        self.storage = storage
        self.chance = random.Random(seed)
        self.drift = 1 + self.chance.uniform(-0.005, 0.005)
        self.skew = self.chance.uniform(-1e5, 1e5)
        self.options = options
        self.kind: Callable[..., RolloutController] = options.pop("kind", RolloutController)
        self.store_kind: Callable[[Network], RolloutStore] = options.pop("store", RolloutStore)
        self.network_kind: Callable[..., Network] = options.pop("network", Network)
        self.lease_by_wall_clock: bool = options.pop("lease_by_wall_clock", False)
        self.alive = False
        self.live()

    def live(self) -> None:
        """Begin a life."""
        self.network = self.network_kind(self.storage, self.chance)
        self.processes = SimulatedProcesses(self.chance, self.monotonic)
        self.controller = self.kind(
            self.store_kind(self.network),
            self.processes,
            decide,
            lease_seconds=LEASE,
            monotonic=self.wall_clock if self.lease_by_wall_clock else self.monotonic,
            clock=self.wall_clock,
            **self.options,
        )
        self.task = asyncio.create_task(self.controller.run())
        self.alive = True

    async def freeze(self, seconds: float) -> None:
        """Stop all processes for some time, as a container is paused."""
        network, processes = self.network, self.processes
        self.alive, network.frozen, processes.frozen = False, True, True
        await asyncio.sleep(seconds)
        network.frozen = processes.frozen = False
        processes.careful = now() + 2.0
        self.alive = self.network is network and not network.dead

    def monotonic(self) -> float:
        return now() * self.drift + self.drift * 1e4

    def wall_clock(self) -> float:
        return 1.7e9 + now() + self.skew

    def kill(self) -> None:
        """End at this moment: the tasks go no further than the next ``await``."""
        self.alive = False
        self.network.dead = self.processes.dead = True
        self.task.cancel()


async def until(
    condition: Callable[[], bool], seconds: float = 600.0, gateways: Sequence[SimulatedGateway] = ()
) -> None:
    """Wait in virtual time, while the gateways serve requests."""
    end = now() + seconds
    while not condition():
        assert now() < end, "it never happened"
        await asyncio.sleep(0.1)
        for gateway in gateways:
            gateway.processes.serve(0.1, 0.0)


async def attempt(command: Awaitable[RolloutState]) -> RolloutState | Exception:
    """The result of a command, or its error."""
    try:
        return await command
    except (Unavailable, NotFound) as error:
        return error


def phases(storage: Storage) -> list[RolloutPhase]:
    """The phases that the states had, without repetitions."""
    found: list[RolloutPhase] = []
    for _, state in storage.states:
        if not found or found[-1] is not state.phase:
            found.append(state.phase)
    return found
