"""The inference service within the quotas of its callers, in turns that are fair to them."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from modelport.gateway.access.context import CURRENT, AccessContext
from modelport.gateway.access.fair_queue import FairQueue
from modelport.gateway.access.quotas import QuotaAccount, Quotas
from modelport.gateway.errors import QuotaExceeded
from modelport.gateway.inference.service import SupportsInference
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.models.model_view import ModelView
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import Deadline, InferRequest, InferResponse

#: Least number of requests that a model may have at a time before its callers take turns.
LEAST_ROOM = 32
#: Batches of every instance that keep a model busy: one is computed while the next one forms.
BATCHES = 2


class LimitedService:
    """``service`` for requests that have passed the rules.

    Args:
        quotas: Those of ``access.toml``.
    """

    def __init__(self, service: SupportsInference, models: ModelView, quotas: Quotas) -> None:
        self._service, self._models, self._quotas = service, models, quotas
        self.splits, self.refuses = service.splits, service.refuses
        #: By model and version, each with the configuration that it is made for.
        self._queues: dict[tuple[str, int], tuple[ModelConfig, FairQueue]] = {}

    async def infer(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        """Answer ``request``, as ``InferenceService.infer``.

        Raises:
            QuotaExceeded: The caller's quota for the model is used up.
        """
        version = self._models.find(request.model_name, request.model_version)
        context = CURRENT.get()
        if version is None or context is None:
            return await self._service.infer(request, deadline)  # which has the error
        caller = context.principal.name
        quotas = self._quotas
        account = quotas.account(context.principal, version.name)
        if account is not None:
            _charge(quotas, account, context, request)
        try:
            queue = self._queue(version)
            if not queue.admits(caller):
                await queue.enter(caller, deadline)
            try:
                return await self._service.infer(request, deadline)
            finally:
                queue.leave(caller)
        finally:
            if account is not None:
                quotas.leave(account)

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses to ``request``, as ``InferenceService.stream``; raise as ``infer``.

        A stream takes no turn: its client decides how long it lasts.
        """
        async with (
            self._charged(request),
            aclosing(self._service.stream(request, deadline)) as responses,
        ):
            async for response in responses:
                yield response

    @asynccontextmanager
    async def _charged(self, request: InferRequest) -> AsyncIterator[None]:
        context, quotas = CURRENT.get(), self._quotas
        version = self._models.find(request.model_name, request.model_version)
        account = None
        if version is not None and context is not None:
            account = quotas.account(context.principal, version.name)
        if account is None or context is None:
            yield
            return
        _charge(quotas, account, context, request)
        try:
            yield
        finally:
            quotas.leave(account)

    def _queue(self, version: ServedVersion) -> FairQueue:
        key = version.name, version.number
        found = self._queues.get(key)
        if found is not None and found[0] is version.config:
            return found[1]
        at_a_time = max(1, version.signature.max_batch_size)
        at_a_time *= configuration.instance_count(version.config)
        queue = FairQueue(max(LEAST_ROOM, BATCHES * at_a_time))
        self._queues[key] = version.config, queue
        return queue


def _charge(
    quotas: Quotas, account: QuotaAccount, context: AccessContext, request: InferRequest
) -> None:
    counted = account.quota.bytes_per_second is not None
    size = sum(tensor.size_bytes for tensor in request.inputs) if counted else 0
    try:
        quotas.enter(account, size)
    except QuotaExceeded as error:
        version = str(request.model_version or "")
        context.note_refusal(str(error), "", request.model_name, version)
        seconds = max(1, math.ceil(error.retry_after_seconds))
        context.response_headers.append((b"retry-after", b"%d" % seconds))
        raise
    finally:
        context.response_headers += quotas.headers(account)
