"""A worker process: it serves, and talks to the parent's coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import structlog

from modelport.gateway import backend_registry as registry
from modelport.gateway.access.quota_ledger import QuotaLedger
from modelport.gateway.errors import ModelportError
from modelport.gateway.models.control import Operation, Operations
from modelport.gateway.runtime.gateway_files import FILES
from modelport.gateway.runtime.watchdog import LoopHeartbeat
from modelport.gateway.server.app import GatewayServer
from modelport.gateway.server.workers import merged_answers
from modelport.gateway.server.workers.channel import ChannelClosed, MessageChannel, receive
from modelport.gateway.server.workers.coordinator_control import MODELS, CoordinatedControl, plain
from modelport.gateway.server.workers.forwarded_requests import RequestReceiver
from modelport.gateway.server.workers.process import VARIABLE, Assignment
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry import configure_logging

log = structlog.get_logger("modelport.workers")


def take_assignment() -> Assignment:
    """Remove the assignment from the environment, and take the files that the parent has accepted.

    A spare waits until it replaces a worker.
    """
    fields = json.loads(os.environ.pop(VARIABLE))
    assignment = Assignment(**{**fields, "arguments": tuple(fields["arguments"])})
    if assignment.spare:
        # Import what takes long before the wait, so that the spare is ready when it is needed.
        _name_process("modelport:spare")
        _leave_signals_to_parent()
        for backend in assignment.backends:
            with contextlib.suppress(ModelportError):  # it is reported when a model needs it
                registry.find_loader(backend)
    with socket.socket(fileno=os.dup(assignment.channel)) as stream:
        try:
            number, rows = receive(stream)
        except (ChannelClosed, OSError):
            os._exit(0)
    _name_process(f"modelport:{number}")
    FILES.receive(rows)
    return replace(assignment, number=number)


async def run(settings: Settings, assignment: Assignment) -> NoReturn:
    """Serve until the parent asks for a drain or ends; then end the process."""
    configure_logging(settings.log_format, settings.log_verbose, assignment.number)
    status = 1
    try:
        await _serve(settings, assignment)
        status = 0
    except ModelportError:
        pass  # reported to the parent, which logs it once; or the parent has ended
    except Exception:
        log.exception("a worker cannot continue")
    finally:
        # Not ``sys.exit``: a run or a load that cannot be interrupted may still hold a thread.
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(status)


async def _serve(settings: Settings, assignment: Assignment) -> None:
    handlers: dict[str, Operation] = {}
    stream = socket.socket(fileno=assignment.channel)
    stream.set_inheritable(False)
    channel = MessageChannel(*await asyncio.open_connection(sock=stream), handlers)
    ledger = None
    if assignment.ledger >= 0:
        ledger = QuotaLedger(settings.workers, assignment.number, assignment.ledger)
    server = GatewayServer(
        settings,
        lambda manager: CoordinatedControl(manager, channel, settings),
        _send_heartbeat(assignment.heartbeats),
        ledger=ledger,
        worker=assignment.number,
    )
    control = server.control
    assert isinstance(control, CoordinatedControl)
    draining = asyncio.Event()
    handlers.update(_handlers(server, control, draining))
    _leave_signals_to_parent()
    listening = asyncio.ensure_future(channel.serve())
    listening.add_done_callback(lambda _: os._exit(1))  # the parent has ended
    starting = asyncio.ensure_future(
        _start(server, control.operations, channel, assignment.restarted)
    )
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


def _send_heartbeat(descriptor: int) -> Callable[[LoopHeartbeat], None]:
    """Make a function that sends a heartbeat, or drops it if the socket is full."""
    heartbeats = socket.socket(fileno=descriptor)
    heartbeats.setblocking(False)
    heartbeats.set_inheritable(False)

    def tell(heartbeat: LoopHeartbeat) -> None:
        with contextlib.suppress(OSError):
            heartbeats.send(heartbeat.packed())

    return tell


async def _start(
    server: GatewayServer, operations: Operations, channel: MessageChannel, restarted: bool
) -> None:
    snapshot = await channel.request("hello")
    if restarted:
        await _catch_up(server, operations, channel, snapshot)
    await server.watcher.poll()  # takes what the parent has accepted meanwhile
    await server.listen()
    routings = await channel.request("listening")
    if not restarted:
        await server.participant.restore(routings)
        await server.load()
    models = len(server.manager.index(True))
    ready, backends = server.manager.ready, registry.imported()
    await channel.request("started", ready=ready, models=models, backends=backends)


async def _catch_up(
    server: GatewayServer,
    operations: Operations,
    channel: MessageChannel,
    snapshot: Mapping[str, Any],
) -> None:
    """Restore the state of the other workers before this one takes requests."""
    states = dict(snapshot["states"] or {})
    await server.participant.restore(snapshot["routings"])
    await server.load(states.pop(MODELS, None))
    await operations.restore(states)
    while True:
        snapshot = await channel.request("join", revision=snapshot["revision"])
        if snapshot["joined"]:
            return
        await server.participant.restore(snapshot["routings"])
        await operations.restore(snapshot["states"] or {})


def _handlers(
    server: GatewayServer, control: CoordinatedControl, draining: asyncio.Event
) -> Mapping[str, Operation]:
    """Handlers of the requests that the parent may send."""
    local = control.local

    async def drain(_: dict[str, Any]) -> None:
        server.manager.draining.set()
        draining.set()

    async def telemetry(_: dict[str, Any]) -> dict[str, Any]:
        families = merged_answers.families_json(server.registry.collect())
        documents, rows = await local.statistics(), await local.index()
        return {"documents": documents, "families": families, "index": rows}

    async def states(_: dict[str, Any]) -> dict[str, Any]:
        return control.operations.states()

    async def follow(_: dict[str, Any]) -> None:
        await server.manager.follow()

    async def use_files(arguments: dict[str, Any]) -> None:
        FILES.receive(arguments["rows"])
        await server.watcher.poll()

    own: tuple[Any, ...] = (drain, telemetry, states, follow, use_files)
    methods: tuple[Any, ...] = (
        local.ready, local.require_ready, local.index, local.pending, server.recent_requests,
        RequestReceiver(server.observed()).answer,
    )  # fmt: skip
    handlers = {each.__name__: each for each in own}
    for method in (*methods, control.operations.run):
        handlers[method.__name__] = plain(method)
    return {**handlers, **server.participant.handlers}


def _name_process(name: str) -> None:
    """Name the process for ``ps`` and ``top``."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _leave_signals_to_parent() -> None:
    """Ignore termination signals: the parent asks for the drain."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
