"""The states of all rollouts in a repository, as one gateway knows them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import structlog

from modelport.gateway.errors import InvalidArgument, ModelportError, NotFound, Unavailable
from modelport.gateway.rollout import lease
from modelport.gateway.rollout.processes import RolloutProcesses
from modelport.gateway.rollout.shared_state import transitions
from modelport.gateway.rollout.shared_state.replicated_rollout import ReplicatedRollout
from modelport.gateway.rollout.shared_state.state import RolloutState
from modelport.gateway.rollout.shared_state.state_store import RolloutStore

log = structlog.get_logger("modelport.rollout")

#: Time between two looks at a rollout that is ending.
LOOK_SECONDS = 0.05


class ReplicatedStates:
    """The rollouts of this gateway, by model, and their states in the store."""

    def __init__(
        self,
        store: RolloutStore,
        processes: RolloutProcesses,
        replica: str,
        lease_seconds: float,
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._processes = processes
        self._replica = replica
        self._lease = lease_seconds
        self._now = now
        self._rollouts: dict[str, ReplicatedRollout] = {}
        #: The reasons why states cannot be read, by model.
        self._problems: dict[str, str] = {}
        #: The reasons why the last revision could not be written, by model.
        self.unwritten: dict[str, str] = {}
        #: The settlements in the background, by model.
        self._settling: dict[str, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[ReplicatedRollout]:
        return iter(tuple(self._rollouts.values()))

    def get(self, model: str) -> ReplicatedRollout | None:
        """The latest rollout of ``model``, if any is known."""
        return self._rollouts.get(model)

    def require(self, model: str) -> ReplicatedRollout:
        """The latest rollout of ``model``.

        Raises:
            NotFound: it has had none.
            InvalidArgument: its state cannot be read.
        """
        if model not in self._rollouts:
            if model in self._problems:
                raise InvalidArgument(self._problems[model])
            raise NotFound(f"model '{model}' has had no rollout")
        return self._rollouts[model]

    async def look(self) -> None:
        """Learn the latest state of every model.

        Raises:
            ModelportError: the store does not respond, or refuses.
        """
        began = self._now()
        latest = await self._store.look()
        for model, revision in latest.items():
            await self._see(model, revision, began)
        await self._forget_gone(latest)

    async def refresh(self, model: str) -> None:
        """Look at the state of ``model``.

        Raises:
            InvalidArgument: it is malformed.
        """
        began = self._now()
        latest = await self._store.look()
        if model in latest:
            await self._see(model, latest[model], began)
        if model in self._problems:
            raise InvalidArgument(self._problems[model])

    async def over(self, model: str, seconds: float) -> None:
        """Wait until this gateway is done with a rollout of ``model`` that has ended, if any.

        Until then its outcome may not be in the configuration, and its versions are held. Another
        gateway may be the one that writes it; after ``seconds`` the wait ends.

        Raises:
            ModelportError: as ``refresh``.
        """
        limit = self._now() + seconds
        while True:
            await self.refresh(model)
            rollout = self._rollouts.get(model)
            if rollout is None or not rollout.ending:
                return
            if rollout.state.settled:
                await rollout.apply()
            elif self._now() >= limit:
                return
            else:
                await asyncio.sleep(LOOK_SECONDS)

    async def write(self, new: RolloutState) -> bool:
        """Write the next revision; whether it is the state now. ``unwritten`` has the reason."""
        began, model = self._now(), new.plan.model
        problem = ""
        try:
            if await self._store.write(new):
                self._adopt(new, began)
                self.unwritten.pop(model, None)
                return True
        except Unavailable as error:  # the answer may be lost, and only the answer
            problem = str(error)
        except ModelportError as error:
            self.unwritten[model] = str(error)
            raise
        await self.refresh(model)
        rollout = self._rollouts.get(model)
        written = rollout is not None and rollout.state == new
        self.unwritten[model] = "" if written else problem
        return written

    def raise_unwritten(self, model: str) -> NoReturn:
        """Raise ``Unavailable`` after many attempts to write the next revision."""
        changes = "the state of the rollout changes too often; try again"
        raise Unavailable(self.unwritten.get(model) or changes)

    @contextlib.contextmanager
    def explaining(self, model: str, command: str) -> Iterator[None]:
        """Say in an error of the store what of ``command`` was applied, and what was not."""
        try:
            yield
        except ModelportError as error:
            rollout = self._rollouts.get(model)
            done = f"nothing has changed, because '{command}' cannot be recorded"
            if rollout is not None and rollout.rollback is not None:
                done = (
                    "this gateway sends nothing to the candidate any more, but the rollback is not "
                    "recorded, so other gateways do not know of it; this one tries again"
                )
            raise type(error)(f"{done}: {error}") from error

    def begin_settlement(self, rollout: ReplicatedRollout) -> None:
        """Settle an outcome in the background, unless that has begun."""
        model = rollout.state.plan.model
        if model not in self._settling or self._settling[model].done():
            self._settling[model] = asyncio.create_task(self._settle(rollout))

    def cancel(self) -> None:
        """Give up the settlements."""
        for task in self._settling.values():
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
            if await self.write(new):
                await self._store.forget_counts(state.plan.model, keep="")
            await rollout.apply()
        except ModelportError as error:
            self.unwritten[ended.plan.model] = str(error)
            log.warning(
                "the outcome of a rollout is not settled yet",
                model=ended.plan.model, reason=str(error),
            )  # fmt: skip
        except Exception:
            log.exception("the outcome of a rollout is not settled yet", model=ended.plan.model)

    async def _see(self, model: str, revision: int, began: float) -> None:
        rollout = self._rollouts.get(model)
        state = rollout.state if rollout is not None else None
        if state is not None and revision < state.revision:
            return  # a network file system shows an old listing
        try:
            if state is None or revision > state.revision:
                state = await self._store.read(model, revision)
        except NotFound:
            return  # there are newer ones
        except InvalidArgument as error:
            if self._problems.get(model) != str(error):
                log.error("the state of a rollout cannot be read", reason=str(error))
            self._problems[model] = str(error)
            if rollout is not None:
                rollout.problem = str(error)
            return
        self._adopt(state, began)

    def _adopt(self, state: RolloutState, confirmed: float) -> None:
        model = state.plan.model
        self._problems.pop(model, None)
        if model not in self._rollouts:
            self._rollouts[model] = ReplicatedRollout(
                state, self._processes, lease.DOUBT * self._lease, self._now
            )
        self._rollouts[model].adopt(state, confirmed)

    async def _forget_gone(self, latest: Mapping[str, int]) -> None:
        for model in self._problems.keys() - latest.keys():
            del self._problems[model]
        for model in self._rollouts.keys() - latest.keys():
            rollout = self._rollouts[model]
            if self._now() - rollout.confirmed > self._lease:
                log.warning("the state of a rollout is gone from the repository", model=model)
                del self._rollouts[model]
                await rollout.forget()
