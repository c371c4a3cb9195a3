"""Failed TLS connections are explained with their remedy."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from modelport.gateway.upstream import tls_errors
from tests.certificates import TestAuthority

URL = "https://localhost:8000"


def failure(client: ssl.SSLContext, server: ssl.SSLContext | None) -> ssl.SSLError:
    """The error of the client; a server without a context answers in clear text."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    far = None if server is None else server.wrap_bio(to_server, to_client, server_side=True)
    if far is None:
        to_client.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ssl.SSLError) as caught:  # noqa: PT012  # which step fails depends on TLS
        for _ in range(4):
            with contextlib.suppress(ssl.SSLWantReadError):
                near.do_handshake()
                near.read()
            if far is not None:
                with contextlib.suppress(ssl.SSLError):
                    far.do_handshake()
    return caught.value


@pytest.mark.parametrize(
    ("names", "days", "trusted", "expected"),
    [
        (("example.org",), 7, True, "call the server by a name that its certificate has"),
        (("localhost",), -1, True, "certificate has expired); the server needs a new one"),
        (("localhost",), 7, False, "give the authority that signed it"),
    ],
)
def test_a_certificate_that_cannot_be_trusted(
    tmp_path: Path, names: tuple[str, ...], days: float, trusted: bool, expected: str
) -> None:
    authority = TestAuthority()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, content in zip(("crt", "key"), authority.sign(*names, days=days), strict=True):
        (tmp_path / name).write_bytes(content)
    server.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    known = authority if trusted else TestAuthority()
    client = ssl.create_default_context(cadata=known.pem.decode())
    error = failure(client, server)
    explained = tls_errors.explain(error, URL) or ""
    assert explained.startswith(f"the certificate of {URL} cannot be trusted (")
    assert expected in explained


def test_a_port_without_tls_and_a_refused_client_certificate(tmp_path: Path) -> None:
    authority, other = TestAuthority(), TestAuthority("another")
    client = ssl.create_default_context(cadata=authority.pem.decode())
    error = failure(client, None)
    expected = f"{URL} does not serve TLS; call it by http or grpc"
    assert tls_errors.explain(error, URL) == expected
    key = ConnectionKey("localhost", 8000, True, True, None, None, None)
    assert tls_errors.explain(aiohttp.ClientConnectorSSLError(key, error), URL) == expected
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*authority.write(tmp_path, "server", "localhost"))
    server.load_verify_locations(cadata=authority.pem.decode())
    server.verify_mode = ssl.CERT_REQUIRED
    for name in ("", "client"):
        if name:
            client.load_cert_chain(*other.write(tmp_path, name, "client"))
        lost = ConnectionError("the connection was lost")
        lost.__cause__ = failure(client, server)
        explained = tls_errors.explain(lost, URL) or ""
        assert explained.startswith(f"{URL} refuses the client certificate"), explained


def test_other_failures_are_not_of_tls() -> None:
    assert tls_errors.explain(ConnectionRefusedError(), URL) is None
