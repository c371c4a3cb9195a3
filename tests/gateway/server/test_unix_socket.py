"""UNIX domain sockets: their files, who they say is calling, and how they end."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from modelport.gateway.access.principal import ConnectionIdentity
from modelport.gateway.errors import Unavailable
from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse
from modelport.gateway.server import unix_socket
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.listening_socket import bind
from modelport.gateway.types import Deadline
from modelport.gateway.wire.proto import grpc_service_pb2 as messages
from tests import models
from tests.server import Gateway, serving

FLAG = "--http-socket"


def test_the_file_has_its_permissions_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    umask = os.umask(0o077)  # it takes nothing away
    try:
        listening = unix_socket.listen(path, FLAG, 0o660)
    finally:
        os.umask(umask)
    assert listening is not None
    assert stat.filemode(path.lstat().st_mode) == "srw-rw----"
    listening.close()
    assert not path.exists()


def test_a_file_that_was_left_behind_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    listening = unix_socket.listen(path, FLAG, 0o600)
    assert listening is not None
    with pytest.raises(Unavailable, match=r"http\.sock: another process listens on it; choose"):
        unix_socket.listen(path, FLAG, 0o600)
    listening.close()


def test_of_two_processes_that_find_the_same_stale_file_one_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    found_stale, listened = threading.Event(), threading.Event()
    outcomes = list[unix_socket.UnixSocket | None]()
    slow = threading.Thread(target=lambda: outcomes.append(_listening(path)))
    unlink = Path.unlink

    def unlink_late(self: Path, missing_ok: bool = False) -> None:
        """Hold up the slow one until the other listens, or waits for it."""
        if threading.current_thread() is slow:
            found_stale.set()
            listened.wait(0.2)
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_late)
    slow.start()
    found_stale.wait()
    outcomes.append(_listening(path))
    listened.set()
    slow.join()
    [listening] = filter(None, outcomes)
    listening.close()


def _listening(path: Path) -> unix_socket.UnixSocket | None:
    try:
        return unix_socket.listen(path, FLAG, 0o600)
    except Unavailable:
        return None


def test_what_is_no_socket_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("precious")
    with pytest.raises(Unavailable, match="data: it exists and is not a socket"):
        unix_socket.listen(path, FLAG, 0o600)
    assert path.read_text() == "precious"


def test_a_file_that_another_process_has_made_since_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    listening = unix_socket.listen(path, FLAG, 0o600)
    assert listening is not None
    path.unlink()
    path.write_text("another's")
    listening.close()
    assert path.read_text() == "another's"


@pytest.mark.parametrize("name", ["missing/http.sock", "x" * 200])
def test_a_path_that_cannot_be_bound_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"cannot listen on .*; choose another --http-socket"):
        unix_socket.listen(tmp_path / name, FLAG, 0o600)


async def test_the_identity_of_a_connection_is_its_user(tmp_path: Path) -> None:
    def app(request: HttpRequest) -> HttpResponse:
        assert request.peer.client is request.peer.server is None
        assert request.peer.identity == ConnectionIdentity(user=getpass.getuser())
        return HttpResponse(200, b"seen")

    path = tmp_path / "http.sock"
    listening = unix_socket.listen(path, FLAG, 0o600)
    listener = HttpListener(app, bind("127.0.0.1", 0, "--http-port"), unix=listening)
    await listener.start()
    for http2 in (False, True):
        transport = httpx.AsyncHTTPTransport(uds=str(path), http1=not http2, http2=http2)
        async with httpx.AsyncClient(transport=transport) as client:
            answer = await client.get("http://localhost/")
            assert (answer.content, answer.http_version) == (
                b"seen",
                "HTTP/2" if http2 else "HTTP/1.1",
            )
    await listener.drain(Deadline.after(0))
    assert not path.exists()


@pytest.fixture(scope="module", params=["1", "2"])
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Gateway, Path]]:
    """A gateway with so many workers, and the folder of its sockets."""
    folder = tmp_path_factory.mktemp("sockets")
    flags = ("--http-socket", str(folder / "http"), "--grpc-socket", str(folder / "grpc"))
    repository = models.repository(tmp_path_factory.mktemp("repository"))
    with serving(repository, *flags, "--workers", request.param) as gateway:
        yield gateway, folder


def test_both_protocols_are_served_until_the_end(gateway: tuple[Gateway, Path]) -> None:
    server, folder = gateway
    transport = httpx.HTTPTransport(uds=str(folder / "http"))
    with httpx.Client(transport=transport, base_url="http://localhost") as client:
        for _ in range(5):
            assert client.get("/v2/models/x2").json()["name"] == "x2"
    with grpc.insecure_channel(f"unix:{folder / 'grpc'}") as channel:
        live = channel.unary_unary(
            "/inference.GRPCInferenceService/ServerReady",
            request_serializer=messages.ServerReadyRequest.SerializeToString,
            response_deserializer=messages.ServerReadyResponse.FromString,
        )
        assert live(messages.ServerReadyRequest(), timeout=60).ready
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert list(folder.iterdir()) == []
