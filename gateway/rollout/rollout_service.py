"""Rollouts as people use them: start one, look at it, and command it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar

from modelport.gateway.access.context import principal_name
from modelport.gateway.access.guarded_models import candidate_target
from modelport.gateway.errors import NotFound, Unavailable
from modelport.gateway.rollout import rollout_request
from modelport.gateway.rollout.controller import RolloutController
from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide
from modelport.gateway.rollout.process_group import ProcessGroup
from modelport.gateway.rollout.rollout_request import RolloutRequest
from modelport.gateway.rollout.shared_state.transitions import RolloutCommand
from modelport.gateway.runtime import checked_json
from modelport.gateway.runtime.checked_json import STRICT

NO_REPOSITORY = (
    "rollouts keep their state in a model repository, and this gateway has none; give one with "
    "--model-repository, even an empty folder, and without --model-config-name"
)


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """The body of a command, which may be empty."""

    __pydantic_config__: ClassVar = STRICT

    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class FeedbackRequest:
    """The body of feedback: labels by request id."""

    __pydantic_config__: ClassVar = STRICT

    rows: list[dict[str, Any]]


class RolloutService:
    """The rollouts of one gateway; without a repository, none can be started.

    Methods raise ``Unavailable`` if there is no repository or its storage does not respond.
    """

    def __init__(self, controller: RolloutController | None, processes: ProcessGroup) -> None:
        self._controller = controller
        self._processes = processes
        #: One start at a time: each loads and holds the versions of its plan.
        self._starting = asyncio.Lock()

    @property
    def _rollouts(self) -> RolloutController:
        if self._controller is None:
            raise Unavailable(NO_REPOSITORY)
        return self._controller

    async def start(self, model: str, content: bytes) -> dict[str, Any]:
        """Start the rollout of the request in ``content``; return its state.

        Raises:
            InvalidArgument, NotFound, Unsupported: the request cannot be carried out.
            AlreadyExists: a rollout of the model is running.
        """
        request = rollout_request.read(content)
        async with self._starting:
            await self._rollouts.over(model)
            described = await self._processes.describe_model(model)
            name, version = rollout_request.candidate_of(request, described)
            target = candidate_target(name, model)
            with target.stated():
                if not version:
                    version = (await self._processes.describe_model(target.name)).default
                candidate = RolloutSide(target.name, version)
                plan = rollout_request.draft(request, described, candidate)
                return await self._start(plan, request)

    async def _start(self, plan: RolloutPlan, request: RolloutRequest) -> dict[str, Any]:
        self._rollouts.require_none(plan)
        try:
            await self._processes.hold(plan)
            sides = [
                await self._processes.describe_version(side)
                for side in (plan.baseline, plan.candidate)
            ]
            plan = rollout_request.completed(plan, request, *sides)
            state = await self._rollouts.start(plan, by=principal_name() or request.by)
        except BaseException:  # also if the client has left
            await self._processes.release(plan)
            raise
        return state.to_json()

    async def command(self, model: str, command: RolloutCommand, content: bytes) -> dict[str, Any]:
        """Carry out a command; return the state after it.

        Raises:
            NotFound: the model has no rollout.
            InvalidArgument: the command has no place in its phase.
        """
        request = checked_json.read(CommandRequest, content or b"{}")
        state = await self._rollouts.command(
            model, command, request.reason, principal_name() or request.by
        )
        return state.to_json()

    def status(self, model: str) -> dict[str, Any]:
        """The state of the model's latest rollout, and what is known at this moment.

        Raises:
            NotFound: it has none.
        """
        return self._rollouts.status(model)

    def statuses(self) -> list[dict[str, Any]]:
        """The statuses of all models that have or had a rollout."""
        if self._controller is None:
            return []
        return [self.status(model) for model in self._controller.models()]

    async def history(self, model: str) -> list[dict[str, Any]]:
        """The rollouts of ``model`` that have ended, latest first."""
        found = await self._rollouts.history(model)
        if not found and model not in self._rollouts.models():
            await self._processes.describe_model(model)  # it may be unknown
        return found

    async def examples(self, model: str) -> list[Any]:
        """The kept requests with disagreeing answers of the latest rollout."""
        if model not in self._rollouts.models():
            raise NotFound(f"model '{model}' has had no rollout")
        return await self._processes.examples(model)

    async def feedback(self, model: str, content: bytes) -> dict[str, Any]:
        """Count labels that came later.

        Raises:
            NotFound: no rollout of the model runs.
            InvalidArgument: a row is malformed.
        """
        request = checked_json.read(FeedbackRequest, content)
        if model not in self._rollouts.models():
            raise NotFound(f"model '{model}' has had no rollout")
        return await self._processes.feedback(model, request.rows)
