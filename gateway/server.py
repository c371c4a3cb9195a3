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
from gateway.protocols.asgi import App
from gateway.protocols.http import HttpApplication, HttpDialect
from gateway.protocols.oip.grpc import OipGrpc
from gateway.protocols.oip.http import OipHttp
from gateway.protocols.prediction.predictor import Predictor
from gateway.protocols.sagemaker import SageMakerHttp
from gateway.protocols.tfserving.grpc import TfServingGrpc
from gateway.protocols.tfserving.http import TfServingHttp
from gateway.protocols.torchserve.grpc import TorchServeGrpc
from gateway.protocols.torchserve.http import TorchServeHttp
from gateway.protocols.torchserve.management import Management
from gateway.protocols.vertex import VertexApplication
from gateway.routes import Program
from gateway.settings import ModelControlMode, Settings
from gateway.telemetry import TfServingRequests, configure_logging
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
        self._dataplane = dataplane = DataPlane(
            self.lifecycle, settings.log_verbose > 0, settings.max_request_timeout_seconds
        )
        self._tfserving = TfServingRequests()
        predictor = Predictor(dataplane, self.lifecycle)
        explicit = settings.model_control_mode is ModelControlMode.EXPLICIT
        management = Management(self.lifecycle, explicit)
        http = self._http(predictor, management)
        methods = {
            **OipGrpc(dataplane, self.lifecycle).methods(),
            **TfServingGrpc(dataplane, self.lifecycle, self._tfserving).methods(),
            **TorchServeGrpc(predictor, self.lifecycle, management).methods(),
        }
        self._front: Front = PortableFront(http, methods, settings)
        self._metrics = HttpListener(
            metrics.application(self.lifecycle.statistics, self._tfserving),
            settings.metrics_address,
            settings.metrics_port,
            "--metrics-port",
        )
        self._poller: asyncio.Task[None] | None = None

    def _http(self, predictor: Predictor, management: Management) -> App:
        """The application of the HTTP port: the dialects."""
        settings, lifecycle = self._settings, self.lifecycle
        limit = settings.http_max_input_bytes
        dialects: list[HttpDialect] = [
            OipHttp(self._dataplane, lifecycle, limit),
            TfServingHttp(self._dataplane, lifecycle, limit, self._tfserving),
            TorchServeHttp(predictor, lifecycle, management, limit),
        ]
        if settings.allow_sagemaker:
            default_model = settings.sagemaker_default_model
            dialects.append(SageMakerHttp(predictor, lifecycle, default_model, limit))
        application = HttpApplication(dialects)
        if settings.vertex_ai is None:
            return application
        return VertexApplication(application, predictor, lifecycle, settings.vertex_ai, limit)

    def _host(self, lifecycle: Lifecycle) -> Host:
        programs = self._settings.routes.servers
        return Host(
            loop=asyncio.get_running_loop(),
            infer=self._dataplane.infer_step,
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
    from exporters.packaging import single

    single.write(
        artifact.model_name, artifact.version, artifact.path, artifact.config, server, path
    )


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
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(0)

    uvloop.run(main())
