"""One of several processes that serve: it is told what to be, and talks to the parent's hub."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import structlog
import uvloop

from modelport.gateway.cli import serve
from modelport.gateway.errors import ModelportError
from modelport.gateway.models.control import Operation
from modelport.gateway.runtime.watchdog import Beat
from modelport.gateway.server.app import Server
from modelport.gateway.server.listeners import Front
from modelport.gateway.server.workers import merge
from modelport.gateway.server.workers.channel import Channel
from modelport.gateway.server.workers.coordinator_control import MODELS, HubControl
from modelport.gateway.server.workers.process import NUMBER_BYTES, VARIABLE, Assignment
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry import configure_logging

log = structlog.get_logger("modelport.workers")


class Worker:
    def __init__(self, settings: Settings, assignment: Assignment) -> None:
        self._settings = settings
        self._assignment = assignment

    @classmethod
    def from_environment(cls) -> Worker:
        """As the parent says; programs that this process starts are not told."""
        told = json.loads(os.environ.pop(VARIABLE))
        assignment = Assignment(**{**told, "arguments": tuple(told["arguments"])})
        if assignment.spare:
            assignment = replace(assignment, number=_wait_for_number(assignment.hub))
        _call_process(f"modelport:{assignment.number}")
        settings = serve.settings_of(assignment.arguments)._replace(
            http_port=assignment.http_port, grpc_port=assignment.grpc_port
        )
        configure_logging(settings.log_format, settings.log_verbose, assignment.number)
        return cls(settings, assignment)

    async def run(self) -> NoReturn:
        """Serve until the parent says that it is the end, or is gone; then the process ends."""
        status = 1
        try:
            await self._serve()
            status = 0
        except ModelportError:
            pass  # the parent has been told, and says it once; or it is gone
        except Exception:
            log.exception("a worker cannot go on")
        finally:
            # A run that cannot be stopped, or a load, may still hold a thread: it ends with us.
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(status)

    async def _serve(self) -> None:
        handlers: dict[str, Operation] = {}
        hub = socket.socket(fileno=self._assignment.hub)
        hub.set_inheritable(False)
        channel = Channel(*await asyncio.open_connection(sock=hub), handlers)
        control: HubControl | None = None

        def make_control(manager: Any) -> HubControl:
            nonlocal control
            control = HubControl(manager, channel, self._settings)
            return control

        server = Server(
            self._settings, functools.partial(Front, reuse_port=True), make_control, self._beats()
        )
        assert control is not None
        draining = asyncio.Event()
        handlers.update(_questions(server, control, draining))
        _end_with_parent(self._assignment)
        _leave_signals_to_parent()
        listening = asyncio.ensure_future(channel.serve())
        starting = asyncio.ensure_future(self._start(server, control, channel))
        ending = asyncio.ensure_future(draining.wait())
        await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            try:
                starting.result()
            except ModelportError as error:
                await channel.request("failed", reason=str(error))
                await server.stop()
                raise
            await ending
        else:
            starting.cancel()
        await server.stop()
        listening.cancel()

    def _beats(self) -> Callable[[Beat], None]:
        """Tells the parent how the event loop does; should it not listen, there is a next time."""
        beats = socket.socket(fileno=self._assignment.beats)
        beats.setblocking(False)
        beats.set_inheritable(False)

        def tell(beat: Beat) -> None:
            with contextlib.suppress(OSError):
                beats.send(beat.packed())

        return tell

    async def _start(self, server: Server, control: HubControl, channel: Channel) -> None:
        standing = await channel.request("hello", number=self._assignment.number)
        if self._assignment.restarted:
            await self._catch_up(server, control, channel, standing)
            await server.listen()
            await channel.request("listening")
        else:
            await server.listen()
            await channel.request("listening")
            await server.load()
        models = len(server.manager.index(True))
        await channel.request("started", ready=server.manager.ready, models=models)

    async def _catch_up(
        self, server: Server, control: HubControl, channel: Channel, standing: Mapping[str, Any]
    ) -> None:
        """Come to the state of the others before anybody asks this one."""
        states = dict(standing["states"] or {})
        await server.load(states.pop(MODELS, None))
        await control.operations.restore(states)
        while True:
            answer = await channel.request("join", revision=standing["revision"])
            if answer["joined"]:
                return
            standing = answer
            await control.operations.restore(standing["states"] or {})


def _questions(
    server: Server, control: HubControl, draining: asyncio.Event
) -> Mapping[str, Operation]:
    """What the parent asks a worker."""
    local = control.local

    async def drain(_: dict[str, Any]) -> None:
        server.manager.draining.set()
        draining.set()

    async def telemetry(_: dict[str, Any]) -> dict[str, Any]:
        families = merge.told(server.registry.collect())
        documents, rows = await local.statistics(), await local.index()
        return {"documents": documents, "families": families, "index": rows}

    async def ready(_: dict[str, Any]) -> bool:
        return await local.ready()

    async def require_ready(arguments: dict[str, Any]) -> None:
        await local.require_ready(**arguments)

    async def index(_: dict[str, Any]) -> list[dict[str, str]]:
        return await local.index()

    async def pending(arguments: dict[str, Any]) -> int:
        return await local.pending(**arguments)

    async def run(arguments: dict[str, Any]) -> Any:
        return await control.operations.run(**arguments)

    async def states(_: dict[str, Any]) -> dict[str, Any]:
        return control.operations.states()

    async def follow(_: dict[str, Any]) -> None:
        await server.manager.follow()

    asked = (drain, telemetry, ready, require_ready, index, pending, run, states, follow)
    return {question.__name__: question for question in asked}


def _wait_for_number(hub: int) -> int:
    """Be ready to take a worker's place, with all that takes long to import; then wait for it.

    Meanwhile it takes processor time that nobody else wants.
    """
    _call_process("modelport:spare")
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(ImportError):
        importlib.import_module("onnxruntime")
    _leave_signals_to_parent()
    with socket.socket(fileno=os.dup(hub)) as waiting:
        number = waiting.recv(NUMBER_BYTES, socket.MSG_WAITALL)
    if len(number) < NUMBER_BYTES:
        os._exit(0)  # the parent has ended
    if hasattr(os, "SCHED_OTHER"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return int.from_bytes(number, "big")


def _call_process(name: str) -> None:
    """Name the process for ``ps`` and ``top``."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _leave_signals_to_parent() -> None:
    """It says when the end has come."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _end_with_parent(assignment: Assignment) -> None:
    """The end of the hub is the end of the parent: nobody would stop this process any more.

    It is a thread that waits for it, lest an event loop that hangs outlive the gateway.
    """
    hub = os.dup(assignment.hub)

    def wait() -> None:
        gone = select.poll()
        gone.register(hub, getattr(select, "POLLRDHUP", select.POLLHUP))
        gone.poll()
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def main() -> None:
    """The program of a worker's process."""
    uvloop.run(Worker.from_environment().run())
