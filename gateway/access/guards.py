"""Guards around the parts of the gateway that dialects use, if ``--access`` is given.

Dialects hold guarded objects only, so no alias route and no new dialect gets around the rules. The
gateway's own requests (steps of ensembles, copies of a rollout) use the objects inside.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

from modelport.gateway.access.context import CURRENT, audited, principal_name, required
from modelport.gateway.access.guarded_models import (
    AllowedTarget,
    GuardedModels,
    denied,
    require_use,
    whole_target,
)
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.policy import ALL_VERSIONS
from modelport.gateway.access.principal import ANONYMOUS_NAME
from modelport.gateway.access.quotas import QuotaAccount, Quotas, retry_after
from modelport.gateway.errors import InvalidArgument, QuotaExceeded
from modelport.gateway.inference.text.text_infer import TOKENS
from modelport.gateway.models.control import Control
from modelport.gateway.models.inference_service import SupportsInference
from modelport.gateway.models.model import ServedVersion, VersionSettings, VersionState
from modelport.gateway.models.model_view import ModelView
from modelport.gateway.repository import config as configuration
from modelport.gateway.types import (
    Answer,
    Deadline,
    InferRequest,
    InferResponse,
    ModelFiles,
    finished,
)

#: A look-up of an enum's member calls a function.
_INFER = Operation.INFER


#: Bytes of text that are about a token.
TOKEN_BYTES = 4


class Charge(NamedTuple):
    """The cost of a request so far; it leaves its row of the ledger at its end."""

    account: QuotaAccount
    row: int
    tokens: int


class GuardedParts(NamedTuple):
    """The guarded objects of one gateway."""

    service: SupportsInference
    models: ModelView
    control: Control


def guard(parts: GuardedParts, quotas: Quotas) -> GuardedParts:
    """Guard the parts that dialects use."""
    service, models, control = parts
    guarded = GuardedModels(models)
    return GuardedParts(
        GuardedService(service, models, guarded, quotas), guarded, GuardedControl(control, guarded)
    )


class GuardedService:
    """The inference service, for requests that the caller may infer, within its quotas."""

    def __init__(
        self, service: SupportsInference, models: ModelView, guarded: GuardedModels, quotas: Quotas
    ) -> None:
        self._service, self._infer = service, service.infer
        self._models, self._guarded = models, guarded
        self._quotas = quotas

    def infer(self, request: InferRequest, deadline: Deadline) -> Answer:
        """Answer ``request``, as ``InferenceService.infer``.

        Raises:
            QuotaExceeded: The caller's quota for the model is used up.
        """
        context = CURRENT.get()
        if context is not None:
            rights = context.rights
            if rights.operation is _INFER and rights.versions[request.model_name] is ALL_VERSIONS:
                caller = context.caller
                request.caller = caller.name
                if caller.has_quota:
                    return self._charged(request, deadline)
                return self._infer(request, deadline)
        return self._restricted(request, deadline)

    async def _restricted(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        with self._restrict(request).stated():
            return await self._charged(request, deadline)

    async def _charged(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        charged = self._charge(request)
        if charged is None:
            return await finished(self._service.infer(request, deadline))
        account, row, estimate = charged
        try:
            response = await finished(self._service.infer(request, deadline))
            tokens = response.parameters.get(TOKENS) if estimate else None
            if type(tokens) is int:
                self._quotas.correct(account, row, tokens - estimate)
            return response
        finally:
            self._quotas.leave(row)

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses to ``request``, as ``InferenceService.stream``; raise as ``infer``.

        A stream of a decoupled model takes no turn: its client decides how long it lasts.
        """
        with self._restrict(request).stated():
            charged = self._charge(request)
            try:
                async with aclosing(self._service.stream(request, deadline)) as responses:
                    async for response in responses:
                        yield response
            finally:
                if charged is not None:
                    self._quotas.leave(charged.row)

    def _restrict(self, request: InferRequest) -> AllowedTarget:
        """Set the caller, and the version of one that may not use all, so that no rollout does."""
        rights = required(Operation.INFER)
        request.caller = principal_name() or ANONYMOUS_NAME
        target = self._guarded.target(request.model_name, request.model_version)
        if rights.versions[request.model_name] is not ALL_VERSIONS:
            request.model_name, request.model_version = target.name, target.number
            request.label = None
        return target

    def _charge(self, request: InferRequest) -> Charge | None:
        """Charge a request to its caller; None: no quota limits it.

        Raises:
            QuotaExceeded: The quota is used up.
        """
        context = CURRENT.get()
        version = self._models.find(request.model_name, request.model_version)
        if context is None or version is None:
            return None  # the service has the error
        account = self._quotas.account(context.principal, version.name)
        if account is None:
            return None
        counted = account.quota.bytes_per_second is not None
        size = sum(tensor.size_bytes for tensor in request.inputs) if counted else 0
        tokens = 0
        if account.quota.tokens_per_second is not None and version.text is not None:
            tokens = _token_estimate(version, request)
        try:
            return Charge(account, self._quotas.enter(account, size, tokens), tokens)
        except QuotaExceeded as error:
            stated = str(request.model_version or "")
            context.note_refusal(str(error), "", request.model_name, stated)
            context.add_fields(retry_after(error))
            raise
        finally:
            context.add_fields(*self._quotas.headers(account))

    def refuses(self, name: str, number: int) -> bool:
        target = self._guarded.target(name, number)
        return self._service.refuses(target.name, target.number)


def _token_estimate(version: ServedVersion, request: InferRequest) -> int:
    """The tokens of a request to a model that has a text interface, before it is tokenized.

    Token ids count as such, with their padding: they cost what texts do.
    """
    if version.takes_texts(request):
        size = sum(tensor.size_bytes for tensor in request.inputs)
        return 1 + size // TOKEN_BYTES
    return max((tensor.data.size for tensor in request.inputs), default=0)


def _require_steps(override: str) -> None:
    """Check the rights to the models that a new configuration makes steps of an ensemble.

    Loading the ensemble loads them, too, and its callers call them.

    Raises:
        PermissionDenied: The caller may not use one of them, which need not exist.
    """
    try:
        steps = configuration.parse_json(override).ensemble_scheduling.step
    except InvalidArgument:
        return  # the control has the error
    for step in steps:
        for operation in (Operation.INFER, Operation.CONTROL):
            require_use(operation, step.model_name, "a step of an ensemble")


def _require_source(name: str, source: str) -> None:
    """Check the rights to serve the model ``source`` under another name.

    The rules for the new name then decide who gets the answers of the source.

    Raises:
        PermissionDenied: The caller may not control both, or not call the source.
    """
    require_use(Operation.CONTROL, name, "a new name of a model")
    for operation in (Operation.INFER, Operation.CONTROL):
        require_use(operation, source, "a model to register under another name")


def _require_all(reason: str) -> None:
    if not required(Operation.CONTROL).unrestricted:
        message = f"{reason}, which needs the operation '{Operation.CONTROL}' on all models"
        raise denied(message)


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

    async def load(
        self,
        name: str,
        override: str | None = None,
        source: str = "",
        files: ModelFiles | None = None,
    ) -> None:
        if source:
            _require_source(name, source)
        if files:
            _require_all("model files of a request may be code, and call any model")
        target = whole_target(Operation.CONTROL, name)
        with audited("load", name), target.stated():
            if override is not None:
                _require_steps(override)
            await self._control.load(target.name, override, source, files)

    async def unload(self, name: str, dependents: bool = False) -> None:
        target = whole_target(Operation.CONTROL, name)
        if dependents:
            _require_all("unloading the models of an ensemble's steps may concern any model")
        with audited("unload", name), target.stated():
            await self._control.unload(target.name, dependents)

    async def unload_version(self, name: str, number: int) -> None:
        required(Operation.CONTROL)
        target = self._models.target(name, number)
        with audited("unload", name, str(number)), target.stated():
            await self._control.unload_version(target.name, target.number)

    async def set_default(self, name: str, number: int) -> None:
        target = whole_target(Operation.CONTROL, name)
        with audited("set default", name, str(number)), target.stated():
            await self._control.set_default(target.name, number)

    async def reload(self, wanted: Mapping[str, VersionSettings]) -> None:
        """Replace the models that are served; that takes the right to all of them."""
        _require_all("a new configuration replaces all served models")
        with audited("reload", " ".join(wanted)):
            await self._control.reload(wanted)

    # -- everything ---------------------------------------------------------------------------

    async def metrics(self, model: str | None, is_openmetrics: bool) -> tuple[str, bytes]:
        required(Operation.METRICS)
        return await self._control.metrics(model, is_openmetrics)

    async def broadcast(self, name: str, arguments: dict[str, Any]) -> Any:
        required(Operation.CONTROL)
        return await self._control.broadcast(name, arguments)
