"""Credentials for other servers: authorities, client certificates and tokens, from files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse
from modelport.gateway.repository import routes_file
from modelport.gateway.repository.routes_file import ModelRoute, RouteCredentials
from modelport.gateway.runtime import file_watcher
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.runtime.gateway_files import GatewayFiles
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.listening_socket import bind
from modelport.gateway.settings import TlsFiles
from modelport.gateway.types import Deadline
from modelport.gateway.upstream import credentials, grpc
from modelport.gateway.upstream.grpc import GrpcChannel
from modelport.gateway.upstream.http import HttpSession
from modelport.gateway.upstream.outlier_detection import EndpointFailed
from modelport.gateway.wire import via_header
from tests.certificates import TestAuthority, server_contexts


class RecordingServer:
    """A server that demands client certificates, and keeps who called with which token."""

    def __init__(self, folder: Path) -> None:
        self.authority = TestAuthority()
        (folder / "ca.crt").write_bytes(self.authority.pem)
        server = self.authority.write(folder, "server")
        self.files = TlsFiles(*server, client_ca=folder / "ca.crt")
        client = self.authority.write(folder, "client", "gateway.example.com")
        (folder / "token").write_text("first\n")
        self.credentials = RouteCredentials(folder / "ca.crt", *client, folder / "token")
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.address = ""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        token = request.fields.get(b"authorization", b"").decode()
        self.calls.append((token, request.peer.identity.certificate_names))
        return HttpResponse(200, b"ok")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        contexts = server_contexts(self.files)
        listener = HttpListener(self, bind("127.0.0.1", 0, "--port"), tls=lambda: contexts.http)
        await listener.start()
        self.address = f"localhost:{listener.port}"
        try:
            yield
        finally:
            await listener.drain(Deadline.after(0))

    def route(self, **changes: object) -> ModelRoute:
        return ModelRoute("triton", (self.address,), tls=True)._replace(
            credentials=self.credentials._replace(**changes)
        )


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordingServer:
    monkeypatch.setattr(via_header, "loops", lambda _: False)  # it is in this process
    return RecordingServer(tmp_path)


async def call_http(route: ModelRoute) -> None:
    session = HttpSession(route)
    try:
        reply = await session.ask("GET", route.endpoints[0], "/", Deadline.after(10))
        assert reply.body == b"ok"
    finally:
        await session.close()


async def call_grpc(route: ModelRoute) -> None:
    channel = GrpcChannel(route.endpoints[0], route)
    try:
        await grpc.exchange(channel.method("/a.B/C"), b"", Deadline.after(10))
    finally:
        await channel.close()


@pytest.mark.parametrize("call", [call_http, call_grpc])
async def test_a_route_shows_its_certificate_and_its_token(
    call: object, server: RecordingServer
) -> None:
    async with server.running():
        await call(server.route())  # type: ignore[operator]
        await call(server.route(token_file=None))  # type: ignore[operator]
    names = ("dns:gateway.example.com",)
    assert server.calls == [("Bearer first", names), ("", names)]


@pytest.mark.parametrize("call", [call_http, call_grpc])
@pytest.mark.parametrize("missing", [{"ca_file": None}, {"client_cert": None, "client_key": None}])
async def test_without_its_files_a_route_is_refused(
    call: object, missing: dict[str, None], server: RecordingServer
) -> None:
    async with server.running():
        with pytest.raises(EndpointFailed):
            await call(server.route(**missing))  # type: ignore[operator]
    assert server.calls == []


async def test_a_token_that_is_replaced_is_read_again_and_a_bad_one_is_not_used(
    server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "CHECK_SECONDS", 0.0)
    path = server.credentials.token_file
    assert path is not None
    async with server.running():
        route = server.route()
        session = HttpSession(route)
        for content in ("second", "two words", "third"):
            path.write_text(content)
            await session.ask("GET", route.endpoints[0], "/", Deadline.after(10))
        await session.close()
    assert [token for token, _ in server.calls] == [
        "Bearer second",
        "Bearer second",
        "Bearer third",
    ]


async def test_a_client_certificate_that_is_replaced_is_shown_on_new_connections(
    server: RecordingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "CHECK_SECONDS", 0.0)
    async with server.running():
        route = server.route(token_file=None)
        channel = GrpcChannel(route.endpoints[0], route)
        method = channel.method("/a.B/C")
        await grpc.exchange(method, b"", Deadline.after(10))
        server.authority.write(tmp_path, "client", "renewed.example.com")
        channel.reset()
        await grpc.exchange(method, b"", Deadline.after(10))
        await channel.close()
    assert [names for _, names in server.calls] == [
        ("dns:gateway.example.com",),
        ("dns:renewed.example.com",),
    ]


@pytest.mark.parametrize("content", ["", " \n", "two words", "a\nb", "\u00e9"])
def test_a_file_without_one_token_is_refused_and_not_quoted(content: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(InvalidArgument) as caught:
        credentials.read_token(tmp_path / "token")
    assert (
        str(caught.value)
        == f"the token file {tmp_path / 'token'} must hold one token, and nothing else"
    )


ROUTE = """
[models.m]
backend = "triton"
endpoints = ["127.0.0.1:1"]
tls = true
"""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('ca_file = "none"', r"\[models.m\] 'ca_file' cannot be read: \S+none: No such file"),
        ('token_file = "none"', r"\[models.m\] 'token_file' cannot be read: \S+none: No such"),
        ('client_cert = "server.crt"', r"'client_cert' and 'client_key' belong together"),
        ('tls = false\nca_file = "ca.crt"', r"'ca_file' needs 'tls = true'"),
    ],
)
def test_what_is_wrong_with_a_route_is_said(
    lines: str, message: str, server: RecordingServer, tmp_path: Path
) -> None:
    text = ROUTE.replace("tls = true", "") if lines.startswith("tls") else ROUTE
    (tmp_path / "routes.toml").write_text(text + lines)
    with pytest.raises(InvalidArgument) as caught:
        routes_file.load(tmp_path / "routes.toml")
    assert re.search(message, str(caught.value))


def test_files_of_a_route_are_relative_to_the_file_of_routes(
    server: RecordingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = 'ca_file = "ca.crt"\nclient_cert = "client.crt"\nclient_key = "client.key"\n'
    (tmp_path / "routes.toml").write_text(ROUTE + lines + 'token_file = "token"')
    monkeypatch.chdir(os.path.sep)
    assert routes_file.load(tmp_path / "routes.toml")["m"].credentials == server.credentials


async def test_workers_use_the_credentials_that_their_parent_has_accepted(
    server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "CHECK_SECONDS", 0.0)
    path, watcher = server.credentials.token_file, FileWatcher()
    assert path is not None
    async with server.running():
        route = server.route()
        path.write_text("two words")
        credentials.follow([route, route], watcher)  # the route is not available yet
        path.write_text("first")
        await watcher.poll()
        path.write_text("two words")
        assert server.credentials.client_key is not None
        server.credentials.client_key.write_text("broken")
        await watcher.poll()
        assert watcher.errors == {credentials.WATCH: 2}
        monkeypatch.setattr(file_watcher, "FILES", GatewayFiles())
        file_watcher.FILES.receive(watcher.rows())
        for call in (call_http, call_grpc):
            await call(route)
    assert server.calls == [("Bearer first", ("dns:gateway.example.com",))] * 2
