"""Commands that call a gateway with mutual TLS, and show it a token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

import modelport as api
from modelport.gateway.errors import InvalidArgument, Unavailable
from modelport.gateway.runtime import gateway_files
from modelport.gateway.upstream import credentials
from tests import models
from tests.certificates import TestAuthority
from tests.commands import modelport
from tests.server import Gateway, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    authority = TestAuthority()
    (folder / "ca.crt").write_bytes(authority.pem)
    authority.write(folder, "server")
    authority.write(folder, "client", "ci.example.com")
    np.save(folder / "x.npy", np.ones((1, 4), np.float32))
    return folder


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[Gateway]:
    with serving(
        models.repository(folder / "repository"),
        *("--tls-cert", str(folder / "server.crt"), "--tls-key", str(folder / "server.key")),
        *("--tls-client-ca", str(folder / "ca.crt")),
    ) as gateway:
        yield gateway


@pytest.fixture
def files(folder: Path) -> tuple[str, ...]:
    """The options of every command."""
    return (
        *("--ca-file", str(folder / "ca.crt"), "--client-cert", str(folder / "client.crt")),
        *("--client-key", str(folder / "client.key")),
    )


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_infer_and_models(
    protocol: str, gateway: Gateway, files: tuple[str, ...], folder: Path
) -> None:
    port = gateway.http_port if protocol == "http" else gateway.grpc_port
    place = ("-i", protocol, "-u", f"localhost:{port}")
    done = modelport("infer", "x2", str(folder / "x.npy"), "--json", *place, *files)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"y": [[2.0] * 4]}
    done = modelport("models", "-u", f"{protocol}s://localhost:{port}", *files)
    assert "READY" in done.stdout


def test_the_rollouts_of_a_gateway(gateway: Gateway, files: tuple[str, ...]) -> None:
    done = modelport(
        "rollout", "status", "--json", "-u", f"localhost:{gateway.metrics_port}", *files
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, [])


@pytest.mark.parametrize("command", [("models",), ("rollout", "status")])
def test_a_certificate_that_is_not_trusted_is_named_with_the_remedy(
    command: tuple[str, ...], gateway: Gateway
) -> None:
    port = gateway.metrics_port if command[0] == "rollout" else gateway.http_port
    done = modelport(*command, "-u", f"https://localhost:{port}")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"the certificate of https://localhost:{port} cannot be trusted" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--client-cert", "empty"), "--client-cert and --client-key belong together"),
        (("--client-cert", "empty", "--client-key", "empty"), "empty and the key empty cannot be"),
        (("--ca-file", "empty"), "empty cannot be used as authorities (PEM): "),
        (("--token-file", "."), "the token file . cannot be read: "),
        (("--client-cert", "none.crt"), "'--client-cert': Path 'none.crt' does not exist"),
        (("--client-key", "none.key"), "'--client-key': Path 'none.key' does not exist"),
        (("--ca-file", "none.crt"), "'--ca-file': Path 'none.crt' does not exist"),
        (("--token-file", "none"), "'--token-file': Path 'none' does not exist"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    flags: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    for command in ("models",), ("rollout", "status"):
        done = modelport(*command, "-u", "https://localhost:1", *flags)
        assert done.returncode == 2
        assert message in done.stderr


class CredentialRecorder(BaseHTTPRequestHandler):
    """Answers every request with an empty list, and keeps its credential."""

    seen: list[str | None]

    def do_GET(self) -> None:
        self.seen.append(self.headers["authorization"])
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def recorder() -> Iterator[HTTPServer]:
    CredentialRecorder.seen = []
    with HTTPServer(("127.0.0.1", 0), CredentialRecorder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("command", [("models",), ("rollout", "status")])
def test_a_token_comes_from_a_file_or_the_environment(
    command: tuple[str, ...], recorder: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ("-u", f"127.0.0.1:{recorder.server_port}")
    assert modelport(*command, *place).returncode == 0
    (tmp_path / "token").write_text("from-file\n")
    modelport(*command, *place, "--token-file", str(tmp_path / "token"))
    monkeypatch.setenv("MODELPORT_TOKEN", "from-environment")
    modelport(*command, *place)
    assert CredentialRecorder.seen == [None, "Bearer from-file", "Bearer from-environment"]


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_the_client_takes_a_context_and_a_token(
    scheme: str, gateway: Gateway, folder: Path
) -> None:
    port = gateway.http_port if scheme == "https" else gateway.grpc_port
    files = (folder / name for name in ("ca.crt", "client.crt", "client.key"))
    context = credentials.client_context(*map(gateway_files.read, files))
    with api.Client(f"{scheme}://localhost:{port}", token="t", tls=context) as client:
        y = client.infer("x2", {"x": np.ones((1, 4), np.float32)})["y"]
        assert y.tolist() == [[2.0] * 4]
    with api.Client(f"{scheme}://localhost:{port}") as client, pytest.raises(Unavailable):
        client.ready()


def test_a_context_for_clear_text_is_refused(folder: Path) -> None:
    context = credentials.client_context(gateway_files.read(folder / "ca.crt"))
    with pytest.raises(InvalidArgument, match="is clear text; with tls, use https:// or grpcs://"):
        api.Client("http://localhost:1", tls=context)


@pytest.mark.parametrize("command", [("models",), ("rollout", "status")])
def test_a_secret_in_a_url_or_a_damaged_token_is_refused_and_not_shown(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = modelport(*command, "-u", "http://ci:s3cret@localhost:1")
    assert done.returncode == 2
    assert done.stderr == (
        "modelport: error: --url has a user name; give the credential with --token-file\n"
    )
    (tmp_path / "long").write_text("s3cret" * 20_000)
    done = modelport(*command, "--token-file", str(tmp_path / "long"))
    assert "long holds more than 65536 bytes; give one token" in done.stderr
    monkeypatch.setenv("MODELPORT_TOKEN", "s3cret\nx: y")
    done = modelport(*command)
    assert done.returncode == 2
    assert (
        done.stderr == "modelport: error: $MODELPORT_TOKEN must hold one token, and nothing else\n"
    )


@pytest.mark.parametrize(
    "url", ["http://[", "http://[::1", "localhost:99999", "http://:80", "ftp://x"]
)
@pytest.mark.parametrize("command", [("models",), ("rollout", "status")])
def test_an_address_that_is_none_is_named(command: tuple[str, ...], url: str) -> None:
    done = modelport(*command, "-u", url)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is not " in done.stderr
    assert "HOST:PORT" in done.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("x\r\ny", "1"), ("x", "1\n2"), ("", "1"), ("x", "s3cret\0")]
)
def test_a_header_that_is_none_of_http_is_refused_and_its_value_not_shown(
    name: str, value: str
) -> None:
    with pytest.raises(
        InvalidArgument, match="is not one of HTTP; remove its line breaks"
    ) as caught:
        api.Client(headers={name: value})
    assert "s3cret" not in str(caught.value)


def test_a_user_name_in_the_clients_url_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="has a user name; give the credential as token") as e:
        api.Client("http://ci:s3cret@localhost:8000")
    assert "s3cret" not in str(e.value)
