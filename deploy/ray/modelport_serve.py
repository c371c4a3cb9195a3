"""modelport's models as Ray Serve deployments, behind the Open Inference Protocol's gRPC methods.

Ray Serve holds the sockets, and the table of gRPC methods is the gateway's.

    client ─ modelport serve --routes routes.toml ─┬─ gRPC proxy of node A ─ Router ─┬─ fraud
             (every dialect; retries on another)    └─ gRPC proxy of node B ─ Router ─┴─ vit

Each model is a deployment of its own and scales by its own requests in flight. A replica is a whole
data plane without sockets: it loads the published version with the gateway's own checks, and
validates, batches and answers with the gateway's own code, so bits and messages are the same.

``Router`` is the application's ingress, one for each node. Serve answers a request whose replica
died with an error; the Router asks another replica instead, once: an inference has no effect but
its answer, and a request that kills replicas must not kill them all. Where a whole node dies, the
gateway in front meets a broken connection and asks the next node.

Serve imports this file on every node: put its folder on ``PYTHONPATH`` (see README.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from modelport.gateway.cli.serve import settings_of
from modelport.gateway.errors import ModelportError, UsageError
from modelport.gateway.models.control import LocalControl
from modelport.gateway.protocols.asgi import App
from modelport.gateway.protocols.grpc_method import Methods
from modelport.gateway.protocols.oip.grpc import SERVICE
from modelport.gateway.protocols.oip.grpc_request import model_of
from modelport.gateway.server.app import GatewayServer
from modelport.gateway.server.grpc import framing
from modelport.gateway.server.grpc.framing import Frames
from modelport.gateway.server.grpc.service import (
    BUSY,
    CLOSING,
    INTERNAL,
    OK,
    CallTarget,
    Ending,
    Service,
)
from modelport.gateway.server.listeners import Listeners
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry import configure_logging
from modelport.gateway.types import NO_DEADLINE, Deadline
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from modelport.gateway.wire.raw_tensors import Buffer

log = structlog.get_logger("modelport.ray")

#: What is answered here: inference and what describes it. Loading and unloading are Serve's, and
#: statistics would be one replica's.
METHODS = (
    "ServerLive",
    "ServerReady",
    "ServerMetadata",
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelInfer",
)
ROUTER = "Router"
#: A request is tried once more after its replica died.
ATTEMPTS = 2
#: Before that, so that Serve may learn which others went with it.
PAUSE_SECONDS = 0.05
_STATUSES = {status.value[0]: status for status in grpc.StatusCode}

#: status, message, content: how a replica's answer travels to a Router.
Answer = tuple[int, str, bytes]


class Arguments(BaseModel):
    """``args`` of the application in Serve's configuration."""

    model_config = ConfigDict(extra="forbid")

    #: As ``modelport serve`` takes it: a folder that every node has, or ``s3://``.
    model_repository: str
    #: Those to serve: each becomes a deployment of its name.
    models: list[str] = Field(min_length=1)
    #: More flags of ``modelport serve`` for every replica, such as ``--require-signature``.
    flags: list[str] = []
    #: How often a request is tried.
    attempts: int = Field(default=ATTEMPTS, ge=1)


class ServeListeners(Listeners):
    """Keeps the table of gRPC methods for Serve's proxies, which hold the sockets."""

    http_port = grpc_port = 0

    def __init__(
        self,
        app: App,
        methods: Methods,
        settings: Settings,
        overloaded: Collection[object],
        splits: Collection[str],
    ) -> None:
        self.service = Service(
            methods,
            settings.http_max_input_bytes,
            overloaded,
            splits,
            rules=settings.grpc_headers,
        )

    async def start(self) -> None:
        """Nothing to bind."""

    async def lame_duck(self, seconds: float) -> None:
        """Serve has taken the replica out of its routers' lists before it stops it."""

    async def drain(self, deadline: Deadline) -> None:
        """Serve waits for requests in flight (``graceful_shutdown_timeout_s``)."""


class Call:
    """One message to the table of methods, and its response."""

    deadline = NO_DEADLINE
    access = None

    def __init__(self, target: CallTarget, content: bytes) -> None:
        self.target = target
        self.connection = self.memory = self  # Serve's proxies count what is unread
        self._content = content
        self.answer: Answer = (INTERNAL.status, INTERNAL.message, b"")

    def enter(self) -> None: ...

    def wait(self) -> None: ...

    def turn(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def body(self) -> bytes:
        return framing.frame(self._content)

    def messages(self, frames: Frames) -> AsyncIterator[bytes]:
        raise NotImplementedError("no method of METHODS has a stream")

    async def message(self, content: bytes) -> None:
        raise NotImplementedError("no method of METHODS has a stream")

    def only(self, content: Sequence[Buffer], ending: Ending = OK) -> None:
        self.answer = (ending.status, ending.message, b"".join(content))

    def end(self, ending: Ending) -> None:
        self.answer = (ending.status, ending.message, b"")

    def cut_off(self) -> Ending:
        return CLOSING


@serve.deployment(max_ongoing_requests=1000)
class Model:
    """One model of the repository, loaded and verified as ``modelport serve`` does."""

    async def __init__(self, name: str, flags: list[str]) -> None:
        """
        Raises:
            Unavailable: the model does not load; Serve shows the reason in ``serve status``.
            click.UsageError: a flag is wrong.
        """
        settings = settings_of(flags)
        if settings.access is not None:
            raise UsageError("--access is not available here: Ray Serve's proxies hold the sockets")
        if settings.access_log is not None or settings.traces.level:
            raise UsageError(
                "--access-log and --trace-config are not available here: the requests are those of "
                "Ray Serve's proxies, which log and trace them"
            )
        configure_logging(settings.log_format, settings.log_verbose)
        self._name = name
        self._server = GatewayServer(settings, LocalControl, make_listeners=self._listeners)
        await self._server.listen()
        await self._server.load()
        log.info("replica is ready", model=name)

    def _listeners(
        self,
        app: App,
        methods: Methods,
        settings: Settings,
        overloaded: Collection[object],
        splits: Collection[str],
        *_: object,
    ) -> ServeListeners:
        listeners = ServeListeners(app, methods, settings, overloaded, splits)
        self._service = listeners.service
        return listeners

    async def answer(self, method: str, content: bytes) -> Answer:
        call = Call(self._service.target(f"/{SERVICE}/{method}".encode(), {}), content)
        waiting = self._service.start(call)
        if waiting is not None:
            await waiting
        return call.answer

    async def reconfigure(self, _: Any) -> None:
        """A changed ``user_config`` loads what has been published since.

        What does not load is refused, and the older version serves on: a bad release must not take
        a replica down.
        """
        try:
            await self._server.control.load(self._name)
        except ModelportError as error:
            log.error("a version is not served", model=self._name, reason=str(error))

    async def check_health(self) -> None:
        """Serve replaces a replica for which this raises."""
        await self._server.control.require_ready(self._name)


class Reply(bytes):
    """A message that is serialised already, as Serve asks for it."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        return bytes(self)


@serve.deployment(
    name=ROUTER,
    # One for each node, so that a proxy finds one beside it and dies with it alone.
    max_replicas_per_node=1,
    # It only waits; a node must have some CPU for it, which a head without replicas has not.
    ray_actor_options={"num_cpus": 0.1},
    max_ongoing_requests=10_000,
)
class Router:
    """The ingress: a request goes to a replica of the model that it names.

    Serve calls the method that has the RPC's name.
    """

    def __init__(self, models: Mapping[str, Any], attempts: int) -> None:
        self._models = dict(models)
        #: Also answers for names that nobody has: it refuses them in the gateway's words.
        self._first = next(iter(self._models.values()))
        self._attempts = attempts

    async def __call__(self, _: Any) -> Any:
        """HTTP, which Serve's proxies also offer."""
        from starlette.responses import JSONResponse

        error = "these ports serve gRPC; for HTTP run 'modelport serve --routes' in front"
        return JSONResponse({"error": error}, status_code=404)

    async def _ask(self, model: Any, method: str, content: bytes) -> Answer:
        for attempt in range(1, self._attempts + 1):
            try:
                answer: Answer = await model.answer.remote(method, content)
                return answer
            except RayActorError:
                log.warning("a replica died with a request", method=method, attempt=attempt)
                await asyncio.sleep(PAUSE_SECONDS if attempt < self._attempts else 0)
            except BackPressureError:
                return (BUSY.status, BUSY.message, b"")
        return (INTERNAL.status, "the replica that ran the request died", b"")

    async def _forward(self, model: Any, method: str, content: bytes, context: Any) -> Reply:
        status, message, reply = await self._ask(model, method, content)
        if status != OK.status:
            context.set_code(_STATUSES[status])
            context.set_details(message)
        return Reply(reply)

    async def _named(self, method: str, content: bytes, context: Any) -> Reply:
        model = self._models.get(_name(method, content), self._first)
        return await self._forward(model, method, content, context)

    async def ServerLive(self, _: bytes) -> Reply:  # noqa: N802
        return Reply(pb.ServerLiveResponse(live=True).SerializeToString())

    async def ServerReady(self, content: bytes) -> Reply:  # noqa: N802
        """READY means ready in one replica of every model."""
        asked = [self._ask(model, "ServerReady", content) for model in self._models.values()]
        answers = await asyncio.gather(*asked)
        ready = all(
            status == OK.status and pb.ServerReadyResponse.FromString(reply).ready
            for status, _, reply in answers
        )
        return Reply(pb.ServerReadyResponse(ready=ready).SerializeToString())

    async def ServerMetadata(self, content: bytes, grpc_context: Any) -> Reply:  # noqa: N802
        return await self._forward(self._first, "ServerMetadata", content, grpc_context)

    async def ModelReady(self, content: bytes, grpc_context: Any) -> Reply:  # noqa: N802
        return await self._named("ModelReady", content, grpc_context)

    async def ModelMetadata(self, content: bytes, grpc_context: Any) -> Reply:  # noqa: N802
        return await self._named("ModelMetadata", content, grpc_context)

    async def ModelConfig(self, content: bytes, grpc_context: Any) -> Reply:  # noqa: N802
        return await self._named("ModelConfig", content, grpc_context)

    async def ModelInfer(self, content: bytes, grpc_context: Any) -> Reply:  # noqa: N802
        return await self._named("ModelInfer", content, grpc_context)


def _name(method: str, content: bytes) -> str:
    """The model that a request names; empty: none, or the message is invalid."""
    try:
        if method == "ModelInfer":
            # Not every client writes the fields in order; then all of it has to be read.
            name, _ = model_of(content)
            return name or str(pb.ModelInferRequest.FromString(content).model_name)
        return str(getattr(pb, f"{method}Request").FromString(content).name)
    except DecodeError:
        return ""


def add_inference_service(servicer: Any, server: Any) -> None:
    """For ``grpc_options.grpc_servicer_functions``: messages pass the proxies unread."""
    rows = {name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name)) for name in METHODS}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, rows),))


def application(settings: dict[str, Any]) -> Any:
    """``import_path: modelport_serve:application``; ``settings`` are ``Arguments``.

    Raises:
        ValueError: they are not; or a model has the Router's name, or one is there twice.
    """
    args = Arguments.model_validate(settings)
    if len(set(args.models)) < len(args.models) or ROUTER in args.models:
        raise ValueError(f"models must be different names, none of them '{ROUTER}': {args.models}")
    models = {}
    for name in args.models:
        flags = [
            *("--model-repository", args.model_repository),
            *("--model-control-mode", "explicit", "--load-model", name, "--exit-on-error", "true"),
            *args.flags,
        ]
        models[name] = Model.options(name=name).bind(name, flags)
    return Router.bind(models, args.attempts)
