"""A backend that starts its own server: one process per model version, and a client for it.

The verified version is packaged into a private folder and the server is started on free loopback
ports. The client is the backend of the same name with these ports as its endpoint. While the server
is down, requests fail with ``Unavailable`` and the reason.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from importlib import metadata
from pathlib import Path

from modelport.gateway.backends.base import ELSEWHERE, Artifact, Backend
from modelport.gateway.backends.capabilities import StreamingBackend
from modelport.gateway.backends.managed.servers import LOOPBACK, SERVERS, StartContext
from modelport.gateway.backends.managed.supervisor import ServerLaunch, ServerSupervisor
from modelport.gateway.backends.registry import find_loader
from modelport.gateway.errors import Internal, InvalidArgument, ModelportError, Unavailable
from modelport.gateway.repository.routes_file import UpstreamProtocol
from modelport.gateway.types import Deadline, InferRequest, InferResponse
from modelport.gateway.upstream.pool import on_loop

#: The entry points that package a version for another server.
PACKAGERS = "modelport.packagers"


def load(artifact: Artifact) -> ManagedBackend:
    """Start a server for the version and wait until it is READY.

    Raises:
        Unavailable: the server did not start; the reason is its last message.
        Unsupported: its program is not installed, or it cannot serve the format.
    """
    backend = ManagedBackend(artifact)
    backend.start()
    return backend


class ManagedBackend:
    """An ``Infer`` over a server of its own."""

    execution = ELSEWHERE

    def __init__(self, artifact: Artifact) -> None:
        if artifact.route is None or artifact.host is None:
            raise InvalidArgument(
                f"no route sets 'managed' for '{artifact.model_name}'; add one to the --routes file"
            )
        self._artifact, self._host, self._route = artifact, artifact.host, artifact.route
        self._server = SERVERS[artifact.route.backend]
        self._program = self._host.program(artifact.route.backend)
        self._command = self._server.find(self._program)
        self.config = artifact.config
        self._inner: Backend | None = None
        self._ports: dict[str, int] = {}
        self._worked = False
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="modelport-managed-"))
        except OSError as error:
            raise self._disk_full(error) from error
        self._package_path = self._folder / self._server.package.format(model=artifact.model_name)
        self._supervisor = ServerSupervisor(
            self._server.title,
            (artifact.model_name, artifact.version),
            self._program.start_timeout_seconds,
            self._prepare,
            self._connect,
            self._disconnect,
        )

    @property
    def problem(self) -> str:
        return self._supervisor.problem or (self._inner.problem if self._inner is not None else "")

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        inner = self._inner
        if self._supervisor.problem or inner is None:
            raise Unavailable(self._supervisor.problem)
        return await self._supervisor.while_up(inner(request, deadline))

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        inner = self._inner
        if self._supervisor.problem or not isinstance(inner, StreamingBackend):
            raise Unavailable(self._supervisor.problem)
        async with aclosing(inner.stream(request, deadline)) as responses:
            while True:
                response = await self._supervisor.while_up(anext(responses, None))
                if response is None:
                    return
                yield response

    def start(self) -> None:
        """Start the server (blocking). Raises as ``load``; then nothing is left of it."""
        try:
            self._package()
            on_loop(self._host.loop, self._supervisor.start())
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def unload(self) -> None:
        on_loop(self._host.loop, self._supervisor.stop())
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- called by the supervisor, in its thread ------------------------------------------------

    def _package(self) -> None:
        artifact, target = self._artifact, self._package_path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _packager()(
                artifact.model_name, artifact.version, artifact.path, artifact.config,
                self._route.backend, target,
            )  # fmt: skip
        except OSError as error:
            raise self._disk_full(error) from error

    def _prepare(self) -> ServerLaunch:
        """Choose ports, the same again if the server was READY on them and they are free."""
        if not (self._worked and all(map(_is_free, self._ports.values()))):
            self._ports = _free_ports(self._server.ports)
        self._worked = False
        setting = StartContext(
            self._artifact,
            self._route,
            self._program,
            folder=self._folder,
            package=self._package_path,
            ports=self._ports,
            command=self._command,
            shared_memory=f"modelport_{secrets.token_hex(8)}_",
        )
        try:
            return self._server.launch(setting)
        except OSError as error:
            raise self._disk_full(error) from error

    def _disk_full(self, error: OSError) -> ModelportError:
        return Internal(
            f"the files of the server of '{self._artifact.model_name}' cannot be written: "
            f"{error.strerror}; set the environment variable TMPDIR to a folder with enough room"
        )

    def _connect(self, launch: ServerLaunch) -> None:
        route = self._route
        port = self._ports["grpc" if route.protocol is UpstreamProtocol.GRPC else "http"]
        management = self._ports.get("management")
        there = route._replace(
            managed=False,
            endpoints=(f"{LOOPBACK}:{port}",),
            management=f"{LOOPBACK}:{management}" if management else "",
        )
        self._inner = find_loader(route.backend)(self._artifact._replace(route=there))
        self._worked = True
        if not self.config.input:
            self.config = self._inner.config  # completed from the server's metadata

    def _disconnect(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.unload()


def _packager() -> Callable[..., None]:
    """The function that packages a version for a server; an entry point names it."""
    found = metadata.entry_points(group=PACKAGERS, name="managed")
    if not found:
        raise Internal(f"no entry point in the group '{PACKAGERS}'; reinstall modelport")
    packager: Callable[..., None] = next(iter(found)).load()
    return packager


def _free_ports(names: tuple[str, ...]) -> dict[str, int]:
    """Choose different loopback ports that are free now."""
    sockets = [socket.socket() for _ in names]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return {name: each.getsockname()[1] for name, each in zip(names, sockets, strict=True)}
    finally:
        for each in sockets:
            each.close()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore closed connections
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
