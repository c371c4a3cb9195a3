"""One model's rollout at one of the gateways that share it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import structlog

from modelport.gateway.rollout.processes import RolloutProcesses
from modelport.gateway.rollout.shared_state.state import (
    RolloutPhase,
    RolloutRouting,
    RolloutState,
    routing_of,
)
from modelport.gateway.rollout.shared_state.transitions import Change
from modelport.gateway.rollout.statistics.counts import StageCounts

log = structlog.get_logger("modelport.rollout")


class PendingRollback(NamedTuple):
    """A rollback that this gateway has decided on, and not recorded yet."""

    change: Change
    #: The criteria as JSON values.
    criteria: tuple[dict[str, Any], ...] = ()


class ReplicatedRollout:
    """The latest known state of a rollout, and the routing that is applied to this gateway.

    Only the event loop uses it. The routing follows from the other attributes; ``apply`` is called
    after each change of one.

    Args:
        doubt_seconds: without word of the state for so long, it may be another by now.
        now: the clock, which is monotonic.
    """

    def __init__(
        self,
        state: RolloutState,
        processes: RolloutProcesses,
        doubt_seconds: float,
        now: Callable[[], float],
    ) -> None:
        self.state = state
        #: The time at which this revision was first seen. Its leader lived shortly before.
        self.seen = now()
        #: A time at which this revision was the latest.
        self.confirmed = float("-inf")
        #: The reason why the latest revision cannot be read.
        self.problem = ""
        #: The reason why the baseline would not be served again after a restart.
        self.baseline_problem = ""
        self.rollback: PendingRollback | None = None
        #: The counts of other gateways, and of earlier lives of this one.
        self.others: Mapping[int, StageCounts] = {}
        #: The routing that all processes have; None: they have none, or it is unknown.
        self.routed: RolloutRouting | None = None
        #: The state whose routing processes may have.
        self._held: RolloutState | None = None
        self._processes = processes
        self._doubt_seconds = doubt_seconds
        self._now = now
        self._applying = asyncio.Lock()

    @property
    def until(self) -> float:
        """The time from which the state is doubtful."""
        return self.confirmed + self._doubt_seconds

    @property
    def doubtful(self) -> bool:
        """Whether other gateways may have another state by now."""
        return bool(self.problem) or self._now() >= self.until

    @property
    def ending(self) -> bool:
        """Whether the rollout has ended, and something is left to do for that."""
        held = self._held is not None and self.wanted() is None
        return self.state.phase.ended and (held or not self.state.settled)

    @property
    def current(self) -> RolloutState:
        """The state with the seconds in the stage until now."""
        if self.state.phase is not RolloutPhase.RUNNING:
            return self.state
        return replace(self.state, seconds=self.state.seconds + self._now() - self.seen)

    def adopt(self, state: RolloutState, confirmed: float) -> None:
        """Take over a state that was the latest at the time ``confirmed``."""
        known = self.state
        if state.revision < known.revision:
            return
        self.confirmed = max(self.confirmed, confirmed)
        self.problem = ""
        if state.revision == known.revision:
            return
        if state.plan.id != known.plan.id:
            self.others = {}
        if state.plan.id != known.plan.id or state.phase.ended:
            self.rollback = None  # it is recorded, or another was faster
        self.state, self.seen = state, self._now()
        if (state.phase, state.stage) != (known.phase, known.stage):
            log.info(
                "rollout", model=state.plan.model, phase=str(state.phase), stage=state.stage + 1,
                reason=state.events[-1].reason if state.events else "",
            )  # fmt: skip

    def stop(self, rollback: PendingRollback) -> None:
        """Decide on a rollback, unless the rollout has ended. It holds until it is recorded."""
        if self.rollback is None and (not self.state.phase.ended or self.state.undoable):
            self.rollback = rollback

    def wanted(self) -> RolloutRouting | None:
        """The routing that this gateway should have now."""
        stopped = self.rollback is not None
        return routing_of(self.state, stopped=stopped, doubtful=self.doubtful, until=self.until)

    def problem_now(self, unwritten: str) -> str:
        """The first of the problems that keep the rollout from going on as planned, if any.

        Args:
            unwritten: the reason why the next revision could not be written.
        """
        if unwritten:
            pending = "a rollback is applied to this gateway, but " * (self.rollback is not None)
            unwritten = f"{pending}the state cannot be recorded: {unwritten}"
        gone = (
            self.baseline_problem
            and f"the baseline can no longer be served: {self.baseline_problem}"
        )
        doubt = "the state is out of date" * self.doubtful
        return self.problem or unwritten or doubt or self.state.hold_reason or gone

    async def apply(self) -> None:
        """Have all processes route as they should now."""
        async with self._applying:
            while True:
                wanted, held = self.wanted(), self._held
                if held is not None and (wanted is None or wanted.plan.id != held.plan.id):
                    await self._processes.remove(self.state if wanted is None else held)
                    self.routed = self._held = None
                elif wanted is None or wanted.same(self.routed):
                    return
                else:
                    self.routed, self._held = None, self.state
                    await self._processes.apply(wanted)
                    self.routed = wanted

    async def forget(self) -> None:
        """Remove the routing: the state is gone."""
        async with self._applying:
            if self._held is not None:
                await self._processes.remove(self._held)
            self.routed = self._held = None
