"""``grpc.health.v1.Health``: ``Check``, ``List`` and ``Watch`` of the gateway's readiness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import Any

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import ModelportError, NotFound
from modelport.gateway.models.control import Control
from modelport.gateway.protocols.grpc_method import Method, Rows
from modelport.gateway.types import Deadline
from modelport.gateway.wire.proto import health_pb2

SERVICE = "grpc.health.v1.Health"
#: Interval at which readiness is polled for watchers.
WATCH_SECONDS = 0.5
_Response = health_pb2.HealthCheckResponse


class Readiness:
    """Readiness of the gateway, polled once for all watchers, and only while there are any."""

    def __init__(self, control: Control, draining: asyncio.Event) -> None:
        self._control, self._draining = control, draining
        self._watchers = 0
        self._poller: asyncio.Task[None] | None = None
        self._ready: bool | None = None
        #: Set and replaced at every change.
        self._changed = asyncio.Event()

    async def changes(self) -> AsyncGenerator[bool, None]:
        """Yield the readiness now and at every change, until the server drains."""
        self._watchers += 1
        try:
            if self._poller is None:
                self._poller = asyncio.get_running_loop().create_task(self._poll())
            last = None
            while True:
                changed, ready, ends = self._changed, self._ready, self._draining.is_set()
                if ends:
                    ready = False  # the last status before the end
                if ready is not None and ready != last:
                    yield ready
                    last = ready
                if ends:
                    return
                await changed.wait()
        finally:
            self._watchers -= 1
            if not self._watchers and self._poller is not None:
                self._poller.cancel()
                self._poller = self._ready = None

    async def _poll(self) -> None:
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            while not self._draining.is_set():
                try:
                    ready = await self._control.ready()
                except ModelportError:
                    ready = False  # unknown counts as not ready
                if ready != self._ready:
                    self._ready = ready
                    self._notify()
                await asyncio.wait({draining}, timeout=WATCH_SECONDS)
        finally:
            draining.cancel()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class HealthGrpc:
    """The health service; the health of ``services`` is the gateway's."""

    def __init__(
        self, control: Control, draining: asyncio.Event, services: Collection[str]
    ) -> None:
        self._control = control
        self._readiness = Readiness(control, draining)
        self._services = frozenset(("", SERVICE, *services))

    def methods(self) -> dict[str, Rows]:
        """Return the methods by service and name."""
        messages = health_pb2.HealthCheckRequest, _Response
        check = Method(*messages, self._check, Operation.HEALTH, health=True)
        watch = Method(*messages, self._watch, Operation.HEALTH, reply_streams=True)
        lists = health_pb2.HealthListRequest, health_pb2.HealthListResponse
        every = Method(*lists, self._list, Operation.HEALTH, health=True)
        return {SERVICE: {"Check": check, "List": every, "Watch": watch}}

    async def _check(self, message: Any, _: Deadline) -> Any:
        if message.service not in self._services:
            raise NotFound(f"unknown service '{message.service}'")
        return _response(await self._control.ready())

    async def _list(self, _: Any, __: Deadline) -> Any:
        status = _response(await self._control.ready())
        return health_pb2.HealthListResponse(statuses=dict.fromkeys(self._services, status))

    async def _watch(self, message: Any, _: Deadline) -> AsyncGenerator[Any, None]:
        """Send the status now and at every change, until the server drains."""
        if message.service not in self._services:
            yield _Response(status=_Response.SERVICE_UNKNOWN)
        async with aclosing(self._readiness.changes()) as changes:
            async for ready in changes:
                if message.service in self._services:
                    yield _response(ready)


def _response(ready: bool) -> Any:
    return _Response(status=_Response.SERVING if ready else _Response.NOT_SERVING)
