"""The controller of rollouts: one in each gateway; together they keep to one state.

One of the gateways leads a rollout: it decides on everyone's counts, and writes a new revision of
the state from time to time. A gateway that has not seen a new revision for ``lease_seconds`` takes
over. Clocks need not agree: each gateway measures by its own, from when it saw the revision.

A gateway that could not look at the state for a while sends everything to the baseline, before
another may take over; so no two gateways are in different stages for longer than the lease.

Any gateway takes commands: it writes the next revision itself, and leads from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from modelport.gateway.errors import InvalidArgument, ModelportError, Unavailable
from modelport.gateway.rollout import lease
from modelport.gateway.rollout.periodic_steps import repeated
from modelport.gateway.rollout.plan import RolloutPlan
from modelport.gateway.rollout.processes import RolloutProcesses
from modelport.gateway.rollout.shared_state import transitions
from modelport.gateway.rollout.shared_state.counts_exchange import CountsExchange, requests_first
from modelport.gateway.rollout.shared_state.replicated_rollout import (
    PendingRollback,
    ReplicatedRollout,
)
from modelport.gateway.rollout.shared_state.replicated_states import ReplicatedStates
from modelport.gateway.rollout.shared_state.state import RolloutPhase, RolloutState
from modelport.gateway.rollout.shared_state.state_store import RolloutStore
from modelport.gateway.rollout.shared_state.transitions import Change, RolloutCommand
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.rollout.statistics.decision import RolloutDecision, RolloutVerdict, decide
from modelport.gateway.rollout.webhooks import RolloutWebhooks

log = structlog.get_logger("modelport.rollout")

#: Period of the looks at the processes, and at the store while a rollout runs. A kill loses the
#: counts of the second period, and of the time that a write takes.
WATCH_SECONDS, FOLLOW_SECONDS = 0.2, 0.5
#: Period of the looks at a folder's states while a candidate serves clients, which another gateway
#: may roll back.
GLANCE_SECONDS = 0.1
#: The first period is this many times as long while no candidate serves clients.
CALM = 5
#: Attempts to write a command against other gateways' revisions.
ATTEMPTS = 10

Decide = Callable[[RolloutPlan, int, Sequence[StageCounts], float], RolloutDecision]


class RolloutController:
    """The rollouts of one gateway. Only the event loop uses it.

    Args:
        decide: the pure function that decides.
        monotonic: this machine's clock; ``clock``: seconds since 1970, for people.
    """

    def __init__(
        self,
        store: RolloutStore,
        processes: RolloutProcesses,
        decide: Decide = decide,
        *,
        lease_seconds: float = lease.LEASE_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
        webhooks: RolloutWebhooks | None = None,
    ) -> None:
        #: Identifies this life of this gateway.
        self.replica = uuid.uuid4().hex
        self._store = store
        self._processes = processes
        self._decide = decide
        self._lease = lease_seconds
        self._now = monotonic
        self._clock = clock
        self._counts = CountsExchange(processes, store, self.replica)
        self._states = ReplicatedStates(store, processes, self.replica, lease_seconds, monotonic)
        self._webhooks = webhooks or RolloutWebhooks(monotonic=monotonic)
        self._tasks: list[asyncio.Task[None]] = []
        #: Ends the pause of a gateway in which nothing ran.
        self._begun = asyncio.Event()

    # -- life -------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Look at the states once, before any model loads, so that both sides are held."""
        try:
            await self.follow()
        except ModelportError as error:
            log.warning("the state of rollouts is unknown", reason=str(error))

    async def run(self) -> None:
        """Follow and lead rollouts until ``stop``."""
        steps = [(self.watch, self._watch_seconds), (self.follow, self._follow_seconds)]
        if self._store.is_quick:
            steps.append((self.glance, self._glance_seconds))
        work = (repeated(*each, self._begun, self._now) for each in steps)
        self._tasks = [asyncio.create_task(each) for each in work]
        try:
            await asyncio.wait(self._tasks)
        finally:
            self._cancel()

    async def stop(self) -> None:
        """Stop, and let another gateway lead at once. The routing stays."""
        self._cancel()
        with contextlib.suppress(ModelportError):
            await self._counts.collect()
            for rollout in self._states:
                if rollout.state.needs_leader:
                    await self._counts.exchange(rollout)
                    for _ in range(ATTEMPTS):  # a write may have been cancelled a moment ago
                        if not self._leads(rollout):
                            break
                        await self._states.write(transitions.led(rollout.current, ""))

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._states.cancel()
        self._webhooks.cancel()

    @property
    def _candidate_answers(self) -> bool:
        """Whether any candidate answers requests of clients."""
        routings = (each.routed for each in self._states)
        return any(each is not None and each.candidate_answers for each in routings)

    def _watch_seconds(self) -> float:
        return WATCH_SECONDS if self._candidate_answers else CALM * WATCH_SECONDS

    def _glance_seconds(self) -> float:
        return GLANCE_SECONDS if self._candidate_answers else FOLLOW_SECONDS

    def _follow_seconds(self) -> float:
        busy = any(each.state.needs_leader for each in self._states)
        return FOLLOW_SECONDS if busy else lease.IDLE * self._lease

    # -- what people ask --------------------------------------------------------------------------

    async def start(self, plan: RolloutPlan, reason: str = "", by: str = "") -> RolloutState:
        """Start a rollout; two starters of one model, at any gateways, do not both succeed.

        Raises:
            AlreadyExists: a rollout of the model runs.
            InvalidArgument: the candidate cannot serve, or webhooks cannot be signed.
            Unavailable: the repository does not respond, or a webhook does not permit it.
        """
        seal = self._webhooks.seal(plan)
        problem = await self._processes.side_problem(plan.candidate)
        if problem:
            raise InvalidArgument(f"the candidate cannot serve: {problem}")
        change = Change(self._clock(), reason, by)
        for _ in range(ATTEMPTS):
            await self._states.refresh(plan.model)
            rollout = self._states.get(plan.model)
            if rollout is not None and rollout.state.plan.id == plan.id:
                break
            before = rollout.state if rollout is not None else None
            new = transitions.started(plan, before, self.replica, change, seal)
            await self._webhooks.require(new)
            await self._write(new)
        else:
            self._states.raise_unwritten(plan.model)
        with contextlib.suppress(ModelportError):
            await self._store.forget_counts(plan.model, plan.id)
        await rollout.apply()
        self._begun.set()
        return rollout.state

    async def over(self, model: str) -> None:
        """Wait until a rollout of ``model`` that has ended is settled, and its versions are free.

        Raises:
            InvalidArgument, Unavailable: the state is malformed, or unknown.
        """
        await self._states.over(model, lease.SETTLED_LEASES * self._lease)

    def require_none(self, plan: RolloutPlan) -> None:
        """Raises ``AlreadyExists``: as far as is known, a rollout of the model runs."""
        rollout = self._states.get(plan.model)
        before = None if rollout is None else rollout.state
        transitions.started(plan, before, self.replica, Change(self._clock()))

    async def command(
        self, model: str, command: RolloutCommand, reason: str = "", by: str = ""
    ) -> RolloutState:
        """Carry out a person's command; return the state after it.

        Raises:
            NotFound: the model has no rollout.
            InvalidArgument: the command has no place in its phase.
            Unavailable: the repository does not respond; a rollback is applied to this gateway, and
                recorded as soon as possible. Or a webhook does not permit the next stage.
        """
        change = Change(self._clock(), transitions.short(reason), transitions.short(by))
        await self._stop_at_once(model, command, change)
        before: RolloutState | None = None
        for _ in range(ATTEMPTS):
            began = self._now()
            with self._states.explaining(model, command):
                await self._states.refresh(model)
            rollout = self._states.require(model)
            if rollout.confirmed < began:
                raise Unavailable("the repository no longer has the state of the rollout")
            before = before or rollout.state
            if transitions.done(command, change, before, rollout.state):
                break
            if rollout.ending and command is RolloutCommand.ROLLBACK:
                await self.over(model)  # whether a promotion can be undone is not known before
            new = transitions.commanded(rollout.current, command, self.replica, change)
            await self._stop_at_once(model, command, change)
            await self._webhooks.require(new)
            with self._states.explaining(model, command):
                await self._write(self._with_evidence(rollout, new))
        else:
            with self._states.explaining(model, command):
                self._states.raise_unwritten(model)
        await rollout.apply()
        return rollout.state

    async def _stop_at_once(self, model: str, command: RolloutCommand, change: Change) -> None:
        """Apply a rollback before the store is asked anything."""
        rollout = self._states.get(model)
        if command is RolloutCommand.ROLLBACK and rollout is not None:
            rollout.stop(PendingRollback(change))
            await rollout.apply()

    def models(self) -> list[str]:
        """The models that have or had a rollout."""
        return sorted(each.state.plan.model for each in self._states)

    def status(self, model: str) -> dict[str, Any]:
        """The state of the model's latest rollout, and what is known at this moment.

        Raises:
            NotFound: it has none.
            InvalidArgument: its state cannot be read.
        """
        rollout = self._states.require(model)
        state = rollout.state
        document = state.to_json() | {
            "seconds": rollout.current.seconds,
            "leads": self._leads(rollout),
            "share": rollout.routed.share if rollout.routed is not None else 0.0,
            "problem": rollout.problem_now(self._states.unwritten.get(model, ""))
            or self._processes.comparison_problem(state.plan.id),
        }
        if not state.phase.ended:
            document["decision"] = self._decision(rollout).to_json()
            document["evidence"] = document["decision"]["criteria"]
            document["counts"] = [each.to_json() for each in self._counts.of(rollout)]
        return document

    async def history(self, model: str) -> list[dict[str, Any]]:
        """The rollouts of ``model`` that have ended, latest first, with evidence and verdict."""
        return [state.to_json() for state in await self._store.history(model)]

    # -- processes --------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Collect counts, stop at once what must be stopped, and route by what is known.

        It never waits for the store.
        """
        await self._counts.collect()
        for rollout in self._states:
            if not rollout.state.phase.ended:
                await self._judge(rollout)
            await requests_first()
            await rollout.apply()

    async def _judge(self, rollout: ReplicatedRollout) -> None:
        plan, routed = rollout.state.plan, rollout.routed
        problem = ""
        if routed is not None and routed.plan.id == plan.id:  # else nothing has loaded it yet
            problem = await self._processes.side_problem(plan.candidate)
            rollout.baseline_problem = await self._processes.side_problem(plan.baseline)
        await requests_first()
        if plan.id != rollout.state.plan.id:
            return
        if problem:
            change = Change(self._clock(), f"the candidate can no longer serve: {problem}")
            rollout.stop(PendingRollback(change))
        elif self._leads(rollout) and not rollout.doubtful:
            decision = self._decision(rollout)
            if decision.verdict is RolloutVerdict.ROLLBACK:
                criteria = tuple(each.to_json() for each in decision.criteria)
                rollout.stop(PendingRollback(Change(self._clock(), decision.reason), criteria))

    def _decision(self, rollout: ReplicatedRollout) -> RolloutDecision:
        state = rollout.current
        return self._decide(state.plan, state.stage, self._counts.of(rollout), state.seconds)

    # -- the store --------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Look at the states, exchange counts, and lead where this gateway is the leader.

        Raises:
            ModelportError: the store does not respond, or refuses.
        """
        began = self._now()
        await self._states.look()
        await self._counts.collect()
        failed: ModelportError | None = None
        for rollout in self._states:
            try:
                await rollout.apply()
                if rollout.confirmed >= began:  # else it is gone, or the listing is an old one
                    await self._lead(rollout)
            except ModelportError as error:
                failed = error
        if failed is not None:
            raise failed

    async def glance(self) -> None:
        """Route by a newer state as soon as it is there, such as another gateway's rollback.

        Raises:
            ModelportError: as ``follow``.
        """
        if self._candidate_answers:
            await self._states.look()
            for rollout in self._states:
                await rollout.apply()

    # -- leading ----------------------------------------------------------------------------------

    def _leads(self, rollout: ReplicatedRollout) -> bool:
        return rollout.state.needs_leader and rollout.state.leader == self.replica

    async def _lead(self, rollout: ReplicatedRollout) -> None:
        """Write the next state if that is this gateway's part."""
        if rollout.rollback is not None:  # applied, but not yet written
            change, criteria = rollout.rollback
            undone = transitions.rolled_back(rollout.current, self.replica, change)
            await self._write(self._with_evidence(rollout, undone, criteria))
            await rollout.apply()
        if rollout.routed is not None and rollout.routed.share:
            self._processes.renew(rollout.state.plan.model, rollout.until)
        if not rollout.state.needs_leader:
            self._counts.forget(rollout.state.plan.id)
            return
        await self._counts.exchange(rollout)
        await requests_first()
        state, silent = rollout.current, self._now() - rollout.seen
        if state.leader != self.replica:
            if not state.leader or silent >= self._lease:
                await self._states.write(transitions.led(state, self.replica))
            return
        new = self._decided(rollout, state) if state.phase is RolloutPhase.RUNNING else None
        if new is not None and self._webhooks.permit(new):
            await self._write(new)
            await rollout.apply()
        else:
            problem = "" if new is None else self._webhooks.problem(state)
            beat = transitions.led(state, self.replica, problem)
            if silent >= lease.HEARTBEAT * self._lease or beat.hold_reason != state.hold_reason:
                await self._states.write(beat)
        if rollout.state.phase.ended and self._leads(rollout):
            self._states.begin_settlement(rollout)

    def _decided(self, rollout: ReplicatedRollout, state: RolloutState) -> RolloutState | None:
        """The state after an automatic decision; None: nothing changes."""
        decision = self._decision(rollout)
        change = Change(self._clock(), decision.reason)
        if decision.verdict is RolloutVerdict.PAUSE:
            return transitions.paused(state, self.replica, change)
        if decision.verdict in (RolloutVerdict.ADVANCE, RolloutVerdict.PROMOTE):
            return self._with_evidence(rollout, transitions.advanced(state, self.replica, change))
        return None

    async def _write(self, new: RolloutState) -> None:
        """Write a change, and notify the webhooks."""
        if await self._states.write(new):
            self._webhooks.notify(new)

    def _with_evidence(
        self,
        rollout: ReplicatedRollout,
        new: RolloutState,
        criteria: tuple[dict[str, Any], ...] = (),
    ) -> RolloutState:
        if not new.phase.ended or rollout.state.phase.ended:
            return new
        if not criteria:
            criteria = tuple(each.to_json() for each in self._decision(rollout).criteria)
        return transitions.with_evidence(new, criteria, self._counts.of(rollout))
