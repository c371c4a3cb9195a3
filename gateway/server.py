"""Wiring, from settings to front, and the process: its start, its signals, its drain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import structlog
import uvloop

from gateway.admin import metrics
from gateway.backends.base import Artifact, Host
from gateway.dataplane import DataPlane
from gateway.errors import Unavailable
from gateway.front.base import Front
from gateway.front.portable import HttpListener, PortableFront
from gateway.lifecycle import Lifecycle
from gateway.protocols.http import HttpApplication
from gateway.protocols.oip_grpc import OipGrpc
from gateway.protocols.oip_http import OipHttp
from gateway.routes import Program
from gateway.settings import ModelControlMode, Settings
from gateway.telemetry import configure_logging
from gateway.types import Deadline

log = structlog.get_logger("modelport.server")

#: While draining: how long requests are served on, readiness already off.
LAME_DUCK_SECONDS = 1.0
#: What is left of the exit timeout when requests are cut off, for telling them and for closing.
CLOSING_SECONDS = 0.1


class Server:
    """One gateway: everything composed once, in the order in which a request passes it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.lifecycle = Lifecycle(settings, make_host=self._host)
        self._dataplane = dataplane = DataPlane(self.lifecycle, settings.log_verbose > 0)
        http = HttpApplication([OipHttp(dataplane, self.lifecycle, settings.http_max_input_bytes)])
        methods = {**OipGrpc(dataplane, self.lifecycle).methods()}
        self._front: Front = PortableFront(http, methods, settings)
        self._metrics = HttpListener(
            metrics.application(self.lifecycle.statistics),
            settings.metrics_address,
            settings.metrics_port,
            "--metrics-port",
        )
        self._poller: asyncio.Task[None] | None = None

    def _host(self, lifecycle: Lifecycle) -> Host:
        programs = self._settings.routes.servers
        return Host(
            loop=asyncio.get_running_loop(),
            infer=self._dataplane.infer,
            config_of=lambda name, number: lifecycle.get(name, number).config,
            package=_package,
            program=lambda server: programs.get(server, Program()),
        )

    @property
    def ports(self) -> dict[str, int]:
        """The ports really bound, by protocol."""
        return {
            "http": self._front.http_port,
            "grpc": self._front.grpc_port,
            "metrics": self._metrics.port,
        }

    async def start(self) -> None:
        """Listen (live, not ready), load the models, be ready.

        Raises:
            Unavailable: a port is taken; or, with ``exit_on_error``, a model does not load.
        """
        await self._metrics.start()
        await self._front.start()
        log.info("listening", **{f"{name}_port": port for name, port in self.ports.items()})
        await self.lifecycle.start()
        broken = self.lifecycle.broken()
        if broken and self._settings.exit_on_error:
            await self.stop()
            raise Unavailable(f"failed to load all models: {', '.join(broken)}")
        if self._settings.model_control_mode is ModelControlMode.POLL:
            self._poller = asyncio.get_running_loop().create_task(self.lifecycle.poll())
        log.info("started", ready=self.lifecycle.ready, models=len(self.lifecycle.index(True)))

    async def stop(self) -> None:
        """Readiness off, listeners closed, requests in flight done, then the backends."""
        timeout = self._settings.exit_timeout_seconds
        deadline = Deadline.after(max(0.0, timeout - CLOSING_SECONDS))
        self.lifecycle.draining.set()
        log.info("draining", timeout_seconds=self._settings.exit_timeout_seconds)
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller
        await self._front.lame_duck(min(LAME_DUCK_SECONDS, timeout / 4))
        self.lifecycle.closing.set()
        await self._front.drain(deadline)
        unloaded = asyncio.wait_for(self.lifecycle.stop(), deadline.remaining())
        await asyncio.gather(unloaded, self._metrics.drain(deadline), return_exceptions=True)
        log.info("stopped")


def _package(artifact: Artifact, server: str, path: Path) -> None:
    raise NotImplementedError  # the managed backends' package: written with them


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once.

    Raises:
        Unavailable: the gateway cannot start.
    """
    configure_logging(settings.log_format, settings.log_verbose)

    async def main() -> None:
        stopping = asyncio.Event()

        def stop() -> None:
            if stopping.is_set():
                os._exit(1)
            stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        server = Server(settings)
        start = asyncio.ensure_future(server.start())
        await asyncio.wait(
            {start, asyncio.ensure_future(stopping.wait())}, return_when="FIRST_COMPLETED"
        )
        if start.done():
            start.result()
            await stopping.wait()
        else:
            start.cancel()
        await server.stop()
        # A run that cannot be stopped, or a load, may still hold a thread: it ends with us.
        sys.stderr.flush()
        os._exit(0)

    uvloop.run(main())
