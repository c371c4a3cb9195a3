"""Settlement of outcomes in the background, while a gateway continues with its other rollouts."""

from __future__ import annotations

import asyncio

import structlog

from modelport.gateway.errors import ModelportError
from modelport.gateway.rollout import transitions
from modelport.gateway.rollout.processes import RolloutProcesses
from modelport.gateway.rollout.replicated_rollout import ReplicatedRollout
from modelport.gateway.rollout.replicated_states import ReplicatedStates
from modelport.gateway.rollout.state_store import RolloutStore

log = structlog.get_logger("modelport.rollout")


class BackgroundSettlement:
    """The outcomes that this gateway is settling, one task for each model."""

    def __init__(
        self,
        store: RolloutStore,
        processes: RolloutProcesses,
        states: ReplicatedStates,
        replica: str,
    ) -> None:
        self._store = store
        self._processes = processes
        self._states = states
        self._replica = replica
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, rollout: ReplicatedRollout) -> None:
        """Settle the outcome, unless that has begun."""
        model = rollout.state.plan.model
        if model not in self._tasks or self._tasks[model].done():
            self._tasks[model] = asyncio.create_task(self._settle(rollout))

    def cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _settle(self, rollout: ReplicatedRollout) -> None:
        ended = rollout.state
        try:
            reason = await self._processes.settle(ended)
            state = rollout.state
            if (state.plan.id, state.phase, state.settled) != (ended.plan.id, ended.phase, False):
                return
            new = transitions.settled(state, self._replica, reason)
            await self._store.archive(new)
            if await self._states.write(new):
                await self._store.forget_counts(state.plan.model, keep="")
            await rollout.apply()
        except ModelportError as error:
            log.warning(
                "the outcome of a rollout is not settled yet",
                model=ended.plan.model, reason=str(error),
            )  # fmt: skip
        except Exception:
            log.exception("the outcome of a rollout is not settled yet", model=ended.plan.model)
