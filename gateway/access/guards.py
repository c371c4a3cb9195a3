"""Guards around the parts of the gateway that dialects use, if ``--access`` is given.

Dialects hold guarded objects only, so no alias route and no new dialect gets around the rules. The
gateway's own requests (steps of ensembles, copies of a rollout) use the objects inside.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

from modelport.gateway.access.context import audited, required
from modelport.gateway.access.guarded_models import (
    AllowedTarget,
    GuardedModels,
    denied,
    whole_target,
)
from modelport.gateway.access.limited_service import LimitedService
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.policy import ALL_VERSIONS
from modelport.gateway.access.quotas import Quotas
from modelport.gateway.inference.service import SupportsInference
from modelport.gateway.models.control import Control
from modelport.gateway.models.model import VersionSettings, VersionState
from modelport.gateway.models.model_view import ModelView
from modelport.gateway.types import Deadline, InferRequest, InferResponse


class GuardedParts(NamedTuple):
    """The guarded objects of one gateway."""

    service: SupportsInference
    models: ModelView
    control: Control


def guard(parts: GuardedParts, quotas: Quotas) -> GuardedParts:
    """Guard the parts that dialects use."""
    service, models, control = parts
    guarded, limited = GuardedModels(models), LimitedService(service, models, quotas)
    return GuardedParts(GuardedService(limited, guarded), guarded, GuardedControl(control, guarded))


class GuardedService:
    """The inference service, for requests that the caller may infer."""

    def __init__(self, service: SupportsInference, models: GuardedModels) -> None:
        self._service = service
        self._models = models
        self.splits = service.splits

    def infer(self, request: InferRequest, deadline: Deadline) -> Awaitable[InferResponse]:
        """Answer ``request``, as ``InferenceService.infer``."""
        if required(Operation.INFER).versions(request.model_name) is ALL_VERSIONS:
            return self._service.infer(request, deadline)
        return self._restricted(request, deadline)

    async def _restricted(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        with self._restrict(request).stated():
            return await self._service.infer(request, deadline)

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses to ``request``, as ``InferenceService.stream``."""
        required(Operation.INFER)
        with self._restrict(request).stated():
            async with aclosing(self._service.stream(request, deadline)) as responses:
                async for response in responses:
                    yield response

    def _restrict(self, request: InferRequest) -> AllowedTarget:
        """Set the version of a caller that may not use all, so that no rollout chooses another."""
        target = self._models.target(request.model_name, request.model_version)
        if required().versions(request.model_name) is not ALL_VERSIONS:
            request.model_name, request.model_version = target.name, target.number
            request.label = None
        return target

    def refuses(self, name: str, number: int) -> bool:
        target = self._models.target(name, number)
        return self._service.refuses(target.name, target.number)


class GuardedControl:
    """The control of models, for what the caller may see and change.

    A change of a whole model takes the right to all of its versions.
    """

    def __init__(self, control: Control, models: GuardedModels) -> None:
        self._control = control
        self._models = models
        self.pid = control.pid
        self.register = control.register

    async def ready(self) -> bool:
        return await self._control.ready()

    async def require_ready(self, name: str, number: int = 0) -> None:
        target = self._models.target(name, number)
        with target.stated():
            await self._control.require_ready(target.name, target.number)

    async def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        return self._shown(await self._control.index(ready_only))

    async def states(self, name: str) -> list[tuple[int, VersionState, str]]:
        target = self._models.target(name)
        with target.stated():
            states = await self._control.states(target.name)
        return [state for state in states if self._models.shows(name, str(state[0]))]

    async def statistics(self, name: str = "", number: int = 0) -> list[dict[str, Any]]:
        asked = self._models.target(name).name if name else ""
        return self._shown(await self._control.statistics(asked, number))

    async def pending(self, name: str, number: int) -> int:
        target = self._models.target(name, number)
        with target.stated():
            return await self._control.pending(target.name, target.number)

    def _shown(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if self._models.shows(row["name"], row.get("version", ""))]

    # -- changes ------------------------------------------------------------------------------

    async def load(self, name: str, override: str | None = None) -> None:
        target = whole_target(Operation.CONTROL, name)
        with audited("load", name), target.stated():
            await self._control.load(target.name, override)

    async def unload(self, name: str, dependents: bool = False) -> None:
        target = whole_target(Operation.CONTROL, name)
        with audited("unload", name), target.stated():
            await self._control.unload(target.name, dependents)

    async def unload_version(self, name: str, number: int) -> None:
        required(Operation.CONTROL)
        target = self._models.target(name, number)
        with audited("unload", name, str(number)), target.stated():
            await self._control.unload_version(target.name, target.number)

    async def set_default(self, name: str, number: int) -> None:
        required(Operation.CONTROL)
        target = self._models.target(name, number)
        with audited("set default", name, str(number)), target.stated():
            await self._control.set_default(target.name, target.number)

    async def reload(self, wanted: Mapping[str, VersionSettings]) -> None:
        """Replace the models that are served; that takes the right to all of them."""
        if not required(Operation.CONTROL).unrestricted:
            raise denied(
                "a new configuration replaces all models that are served, which takes the "
                f"operation '{Operation.CONTROL}' on all models"
            )
        with audited("reload", " ".join(wanted)):
            await self._control.reload(wanted)

    # -- everything ---------------------------------------------------------------------------

    async def metrics(self) -> tuple[str, bytes]:
        required(Operation.METRICS)
        return await self._control.metrics()

    async def broadcast(self, name: str, arguments: dict[str, Any]) -> Any:
        required(Operation.CONTROL)
        return await self._control.broadcast(name, arguments)
