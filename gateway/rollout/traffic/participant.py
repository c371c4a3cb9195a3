"""One serving process in the rollouts of its gateway.

The gateway's controller, in this process or in the parent of the workers, calls the operations of
``handlers`` with JSON values.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import structlog

from modelport.gateway.errors import ModelportError, NotFound, Unavailable
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import VersionState
from modelport.gateway.models.next_action import VersionHold
from modelport.gateway.rollout import side_description
from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide
from modelport.gateway.rollout.traffic.rollouts import Rollouts

log = structlog.get_logger("modelport.rollout")

Arguments = Mapping[str, Any]
#: A routing or a plan as JSON values.
Document = dict[str, Any]


def holds_of(plan: RolloutPlan, default: int) -> dict[str, VersionHold]:
    """The versions that a rollout keeps served, by model; the default version loads first."""
    versions = [default, plan.baseline.version]
    holds = {}
    if plan.candidate.model == plan.model:
        versions.append(plan.candidate.version)
    else:
        holds[plan.candidate.model] = VersionHold((plan.candidate.version,))
    return {plan.model: VersionHold(tuple(dict.fromkeys(versions)), versions[0]), **holds}


class RolloutParticipant:
    """The held versions, the traffic splits and the counts of this process."""

    def __init__(self, manager: ModelManager, rollouts: Rollouts) -> None:
        self._manager = manager
        self._rollouts = rollouts
        #: No later process has it.
        self.id = secrets.token_hex(8)
        #: The last routing by model, also while it does not hold.
        self._routings: dict[str, Document] = {}
        #: The examples of the last rollout of a model that has ended.
        self._examples: dict[str, list[Any]] = {}
        #: Timers that suspend the routing of a model unless the controller renews it.
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self.handlers: Mapping[str, Callable[[Arguments], Awaitable[Any]]] = {
            f"rollout_{operation.__name__}": operation
            for operation in (
                self.describe_model, self.describe_version, self.hold, self.hold_sides, self.apply,
                self.remove,
                self.counts, self.problem, self.renew, self.examples, self.feedback,
            )
        }  # fmt: skip

    async def describe_model(self, arguments: Arguments) -> Document:
        """Describe a model; as ``side_description.model``."""
        return dataclasses.asdict(side_description.model(self._manager, arguments["model"]))

    async def describe_version(self, arguments: Arguments) -> Document:
        """Describe a version; as ``side_description.version``."""
        model, number = arguments["model"], arguments["version"]
        return dataclasses.asdict(
            await asyncio.to_thread(side_description.version, self._manager, model, number)
        )

    async def hold(self, arguments: Arguments) -> None:
        """Load both sides of a plan, and keep them served. The default version stays.

        Raises:
            ModelportError: as ``HeldVersions.hold``, or the models are still loading.
        """
        plan = RolloutPlan.from_json(arguments["plan"])
        if not self._manager.started:
            raise Unavailable(
                "the gateway is still loading its models; start the rollout when it is ready"
            )
        await self._hold(plan, self._manager.get(plan.model).number)

    async def _hold(self, plan: RolloutPlan, default: int) -> None:
        holds = holds_of(plan, default)
        if not self._manager.started:
            for name, hold in holds.items():
                self._manager.held.expect(name, hold, plan.id)
            return
        for name, hold in holds.items():
            await self._manager.held.hold(name, hold, plan.id)

    async def apply(self, arguments: Arguments) -> None:
        """Route requests as the routing says, at once."""
        routing: Document = arguments["routing"]
        model = routing["model"]
        known = self._routings.get(model, routing)
        same = known["plan"]["id"] == routing["plan"]["id"]
        if same and routing["revision"] < known["revision"]:  # it was overtaken
            return
        self._routings[model] = routing
        self._lease(model, routing["until"])

    async def hold_sides(self, arguments: Arguments) -> None:
        """Hold both sides, and only log a failure, which ``problem`` reports."""
        plan = RolloutPlan.from_json(arguments["routing"]["plan"])
        try:
            await self._hold(plan, _default(plan))
        except ModelportError as error:
            log.error("a version of a rollout is not served", model=plan.model, reason=str(error))

    def _lease(self, model: str, until: float | None) -> None:
        """Route as the model's routing says until a monotonic time; None: for good."""
        if model in self._leases:
            self._leases.pop(model).cancel()
        loop, seconds = asyncio.get_running_loop(), 0.0
        if until is not None:
            seconds = until - time.monotonic()
            if seconds > 0:
                self._leases[model] = loop.call_later(seconds, self._suspend, model)
        # A candidate that is still loading is not at fault.
        active = self._manager.started and (until is None or seconds > 0)
        routing = self._routings[model]
        self._rollouts.apply(routing if active else {**routing, "share": 0.0})

    def _suspend(self, model: str) -> None:
        """Send everything to the baseline: the controller is stuck or gone."""
        if self._routings[model]["share"]:
            log.error("a rollout is suspended because its controller does not respond", model=model)
        self._lease(model, 0.0)

    async def renew(self, arguments: Arguments) -> None:
        """Route until a later monotonic time."""
        if arguments["model"] in self._routings:
            self._routings[arguments["model"]]["until"] = arguments["until"]
            self._lease(arguments["model"], arguments["until"])

    def loaded(self) -> None:
        """Route requests; call when the models are loaded."""
        for model, routing in self._routings.items():
            self._lease(model, routing["until"])

    async def remove(self, arguments: Arguments) -> None:
        """End a rollout: release its versions, then split nothing.

        The arguments are the plan, and the winner as a side, or None if there is none.
        """
        plan = RolloutPlan.from_json(arguments["plan"])
        won = arguments["winner"] and RolloutSide(*arguments["winner"])
        held, holds = self._manager.held, holds_of(plan, _default(plan))
        own = plan.candidate.model == plan.model
        if not won:
            for name in holds:
                await held.release(name, rollout=plan.id)
        elif won == plan.candidate and own:
            await held.release(
                plan.model, won.version, plan.baseline.version, plan.label, plan.moves_default,
                rollout=plan.id,
            )  # fmt: skip
        elif plan.keep:
            for name, hold in holds.items():
                await held.hold(name, hold._replace(kept=True), plan.id)
        else:
            other = plan.candidate.version if own else 0
            await held.release(
                plan.model, plan.baseline.version, other, "", plan.moves_default,
                rollout=plan.id,
            )  # fmt: skip
            if not own:
                await held.release(plan.candidate.model, rollout=plan.id)
        routing = self._routings.get(plan.model)
        if routing is not None and routing["plan"]["id"] == plan.id:
            self._examples[plan.model] = self._rollouts.examples(plan.model)
            self._rollouts.remove(plan.model)
            del self._routings[plan.model]
            if plan.model in self._leases:
                self._leases.pop(plan.model).cancel()

    async def counts(self, _: Arguments) -> dict[str, Any]:
        """The counts of this process since it began, with its identifier."""
        return {"process": self.id, "counts": self._rollouts.counts()}

    async def problem(self, arguments: Arguments) -> str:
        """The reason why a side can no longer serve; empty while it serves or loads."""
        side = RolloutSide(*arguments["side"])
        if not self._manager.started:
            return ""
        served = self._manager.find(*side)
        gone = f"model '{side.model}' no longer has version {side.version}"
        if served is not None:
            return served.backend.problem or ("" if await self._has(side) else gone)
        if self._manager.is_retried(*side):
            return ""
        try:
            states = self._manager.states(side.model)
        except NotFound as error:
            return str(error)
        for number, state, reason in states:
            if number == side.version:
                return "" if state is VersionState.LOADING else reason or f"it is {state}"
        return gone

    async def _has(self, side: RolloutSide) -> bool:
        """Whether a version that is served is still there to be loaded again."""
        if not self._manager.has(*side):
            return False
        # Without polling, nobody else would notice that the folder is gone.
        folder = self._manager.folder(*side)
        return folder is None or await asyncio.to_thread(folder.is_dir)

    async def restore(self, routings: Iterable[Document]) -> None:
        """Begin with the routings of the other workers, and drop all others."""
        routings = list(routings)
        plans = {routing["model"]: routing["plan"] for routing in routings}
        for model in self._routings.keys() - plans.keys():
            await self.remove({"plan": self._routings[model]["plan"], "winner": None})
        for routing in routings:
            arguments = {"routing": routing}
            if routing["share"]:
                await self.hold_sides(arguments)
            await self.apply(arguments)
            await self.hold_sides(arguments)

    async def examples(self, arguments: Arguments) -> list[Any]:
        """The kept requests with disagreeing answers, also after the rollout's end."""
        model = arguments["model"]
        if model in self._routings:
            return self._rollouts.examples(model)
        return self._examples.get(model, [])

    async def feedback(self, arguments: Arguments) -> dict[str, Any] | None:
        """Count labels that came later; complete rows only in the process that is named."""
        process = arguments["process"]
        if process not in ("", self.id):
            return None
        model, rows = arguments["model"], arguments["rows"]
        return {"process": self.id, **self._rollouts.feedback(model, rows, bool(process))}


def _default(plan: RolloutPlan) -> int:
    """The version for requests without one while the rollout of ``plan`` runs."""
    return plan.default_version or plan.baseline.version
