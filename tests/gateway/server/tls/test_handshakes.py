"""Handshakes: what OpenSSL's own client is refused, what is negotiated, and what they may cost."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse
from modelport.gateway.server import listening_socket, time_limits
from modelport.gateway.server.grpc.connection import GrpcListener
from modelport.gateway.server.grpc.service import Service
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.listening_socket import bind
from modelport.gateway.server.tls import transport
from modelport.gateway.server.tls.certificate import TlsContexts
from modelport.gateway.settings import TlsFiles
from modelport.gateway.types import Deadline
from tests.certificates import TestAuthority, server_contexts

PATIENCE_SECONDS = 60.0
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def identity(request: HttpRequest) -> HttpResponse:
    """Answer with the scheme, and the names of the client certificate."""
    found = request.peer.identity
    body = " ".join((request.peer.scheme, found.address, *found.certificate_names)).encode()
    return HttpResponse(200, body)


@pytest.fixture
def contexts(tls_files: TlsFiles) -> TlsContexts:
    return server_contexts(tls_files)


@pytest.fixture
def client(authority: TestAuthority) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.pem.decode())


@contextlib.asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[HttpListener]:
    listener = HttpListener(identity, bind("127.0.0.1", 0, "--http-port"), tls=lambda: context)
    await listener.start()
    try:
        yield listener
    finally:
        await listener.drain(Deadline.after(0))


async def get(port: int, context: ssl.SSLContext | None, request: bytes = GET) -> bytes:
    """Everything that the server sends until it, or this client, closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(1000), PATIENCE_SECONDS)
    finally:
        writer.close()


# -- OpenSSL's client -----------------------------------------------------------------------------


async def s_client(port: int, *options: str, command: bytes = b"") -> tuple[int, str]:
    """Exit status and output of ``openssl s_client``; a request follows a command."""
    process = await asyncio.create_subprocess_exec(
        "openssl", "s_client", "-connect", f"127.0.0.1:{port}", *options,
        stdin=-1, stdout=-1, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    output = b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        if command:
            output += await process.stdout.readuntil(b"Verify return code: ")
            process.stdin.write(command)
            while not output.endswith((b"KEYUPDATE\n", b"RENEGOTIATING\n")):
                output += await process.stdout.readline()
            process.stdin.write(GET.replace(b"\r", b""))
            while (line := await process.stdout.readline()) and not line.startswith(b"HTTP"):
                output += line
            output += line
        process.stdin.close()
        output += await process.stdout.read()
        return await process.wait(), output.decode(errors="replace")


ALLOW_CLIENT_RENEGOTIATION = 1 << 8  # openssl/ssl.h; Python does not name it
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
#: Options of the client; at level 0 it offers what its default forbids.
REFUSED = {
    "TLS 1.0": ("-tls1", "-cipher", "ALL:@SECLEVEL=0"),
    "TLS 1.1": ("-tls1_1", "-cipher", "ALL:@SECLEVEL=0"),
    "no encryption": ("-tls1_2", "-cipher", "NULL:@SECLEVEL=0"),
    "no authentication": ("-tls1_2", "-cipher", "aNULL:@SECLEVEL=0"),
    "no forward secrecy": ("-tls1_2", "-cipher", "kRSA:@SECLEVEL=0"),
    "CBC": ("-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-SHA:ECDHE-ECDSA-AES256-SHA384:@SECLEVEL=0"),
    "CCM with short tags": ("-tls1_3", "-ciphersuites", "TLS_AES_128_CCM_8_SHA256"),
}
TAKEN = {
    "TLS 1.3": (("-tls1_3",), "TLSv1.3, Cipher is TLS_AES_256_GCM_SHA384"),
    "ChaCha20": (
        ("-tls1_3", "-ciphersuites", "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_256_GCM_SHA384"),
        "TLSv1.3, Cipher is TLS_CHACHA20_POLY1305_SHA256",
    ),
    "TLS 1.2": (("-tls1_2",), "TLSv1.2, Cipher is ECDHE-ECDSA-AES256-GCM-SHA384"),
}


@needs_openssl
@pytest.mark.parametrize("what", REFUSED)
async def test_openssls_client_is_refused(what: str, contexts: TlsContexts) -> None:
    async with listening(contexts.http) as listener:
        status, output = await s_client(listener.port, *REFUSED[what])
    assert status == 1, output
    assert "Cipher is (NONE)" in output


@needs_openssl
async def test_a_weak_context_is_found_weak(contexts: TlsContexts) -> None:
    """The known-bad variant: what is refused is refused by the context."""
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        contexts.http.minimum_version = ssl.TLSVersion.TLSv1
    contexts.http.set_ciphers("ALL:@SECLEVEL=0")
    async with listening(contexts.http) as listener:
        for what in ("TLS 1.0", "TLS 1.1", "no authentication", "CBC"):
            status, output = await s_client(listener.port, *REFUSED[what])
            assert (status, "Cipher is (NONE)" in output) == (0, False), (what, output)


@needs_openssl
@pytest.mark.parametrize("what", TAKEN)
async def test_openssls_client_is_taken(what: str, contexts: TlsContexts) -> None:
    options, agreed = TAKEN[what]
    async with listening(contexts.http) as listener:
        status, output = await s_client(listener.port, *options)
    assert status == 0, output
    assert agreed in output
    assert "Compression: NONE" in output
    assert "Secure Renegotiation IS" in output


@needs_openssl
@pytest.mark.parametrize("allowed", [False, True])
async def test_renegotiation_is_refused(allowed: bool, contexts: TlsContexts) -> None:
    """``R`` begins it; with other options, the known-bad variant, it succeeds."""
    if allowed:
        contexts.http.options &= ~ssl.OP_NO_RENEGOTIATION
        contexts.http.options |= ALLOW_CLIENT_RENEGOTIATION
    async with listening(contexts.http) as listener:
        _, output = await s_client(listener.port, "-tls1_2", "-crlf", command=b"R\n")
    assert "RENEGOTIATING" in output
    assert ("no renegotiation" in output) is not allowed
    assert ("HTTP/1.1 200" in output) is allowed


@needs_openssl
@pytest.mark.parametrize("version", ["-tls1_2", "-tls1_3"])
async def test_no_ticket_is_given_and_no_session_outlives_its_certificate(
    version: str, contexts: TlsContexts, tls_files: TlsFiles, tmp_path: Path
) -> None:
    saved = tmp_path / "session"
    async with listening(contexts.http) as listener:
        _, output = await s_client(listener.port, version, "-sess_out", str(saved))
    assert "TLS session ticket:" not in output
    async with listening(server_contexts(tls_files).http) as listener:
        options = ("-sess_in", str(saved)) if saved.exists() else ()
        _, output = await s_client(listener.port, version, *options)
    assert "New, TLS" in output


# -- what is agreed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offered", "agreed"),
    [(["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1"), (["spdy/3"], None), ([], None)],
)
async def test_alpn_chooses_http2_before_http1(
    offered: list[str], agreed: str | None, contexts: TlsContexts, client: ssl.SSLContext
) -> None:
    if offered:
        client.set_alpn_protocols(offered)
    async with listening(contexts.http) as listener:
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=client)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == agreed
        writer.close()


async def test_a_grpc_port_agrees_on_http2_only(
    contexts: TlsContexts, client: ssl.SSLContext
) -> None:
    listener = GrpcListener(
        Service({}, 1000), bind("127.0.0.1", 0, "--grpc-port"), tls=lambda: contexts.grpc
    )
    await listener.start()
    for offered, agreed in ((["h2"], "h2"), (["http/1.1", "h2"], "h2"), (["http/1.1"], None)):
        client.set_alpn_protocols(offered)
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=client)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == agreed
        writer.close()
    await listener.drain(Deadline.after(0))


async def test_clear_text_is_answered_with_the_remedy(contexts: TlsContexts) -> None:
    async with listening(contexts.http) as listener:
        answer = await get(listener.port, None)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b'{"error":"this port serves TLS: use https"}')


# -- client certificates --------------------------------------------------------------------------


@pytest.fixture
def mutual(tls_files: TlsFiles, authority: TestAuthority, tmp_path: Path) -> TlsFiles:
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    return tls_files._replace(client_ca=tmp_path / "ca.crt")


def with_certificate(
    context: ssl.SSLContext, signer: TestAuthority, folder: Path, **options: Any
) -> ssl.SSLContext:
    names = ("ci.example.com", "spiffe://example.com/ci")
    context.load_cert_chain(*signer.write(folder, "client", *names, **options))
    return context


@pytest.mark.parametrize("required", [True, False])
async def test_the_names_of_a_client_certificate_identify_the_connection(
    required: bool,
    mutual: TlsFiles,
    client: ssl.SSLContext,
    authority: TestAuthority,
    tmp_path: Path,
) -> None:
    served = server_contexts(mutual._replace(client_required=required)).http
    with_certificate(client, authority, tmp_path)
    async with listening(served) as listener:
        answer = await get(listener.port, client)
    assert answer.endswith(
        b"\r\n\r\nhttps 127.0.0.1 dns:ci.example.com uri:spiffe://example.com/ci"
    )


async def test_a_client_without_a_certificate_is_refused_where_one_is_required(
    mutual: TlsFiles, client: ssl.SSLContext
) -> None:
    async with listening(server_contexts(mutual).http) as listener:
        with pytest.raises(ssl.SSLError, match="certificate required"):
            await get(listener.port, client)
    optional = server_contexts(mutual._replace(client_required=False)).http
    async with listening(optional) as listener:
        assert (await get(listener.port, client)).endswith(b"\r\n\r\nhttps 127.0.0.1")


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(("foreign", "days"), [(True, 1.0), (False, -1.0)])
async def test_a_wrong_client_certificate_is_refused_even_where_none_is_required(
    required: bool, foreign: bool, days: float, mutual: TlsFiles, client: ssl.SSLContext,
    authority: TestAuthority, tmp_path: Path,
) -> None:  # fmt: skip
    served = server_contexts(mutual._replace(client_required=required)).http
    with_certificate(
        client, TestAuthority("another") if foreign else authority, tmp_path, days=days
    )
    async with listening(served) as listener:
        with pytest.raises(ssl.SSLError, match=r"unknown ca|certificate expired"):
            await get(listener.port, client)


# -- limits ---------------------------------------------------------------------------------------


async def until_closed(connection: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionResetError):
        return await asyncio.wait_for(loop.sock_recv(connection, 100), PATIENCE_SECONDS)
    return b""


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setblocking(False)
    connection.send(sent)
    return connection


@pytest.mark.parametrize(
    "sent", [b"", b"\x16\x03\x01\x02\x00\x01", b"\x16\x03\x01\x40\x00" + bytes(999)]
)
async def test_a_handshake_that_is_never_finished_ends_with_the_time_for_a_head(
    sent: bytes, contexts: TlsContexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limits, "HEAD_SECONDS", 0.2)
    async with listening(contexts.http) as listener:
        with connect(listener.port, sent) as connection:
            await until_closed(connection)
        assert not listener.state.connections


async def test_handshakes_count_as_connections_and_leave_room_for_health_checks(
    contexts: TlsContexts, client: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening_socket, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(listening_socket, "HEALTH_CONNECTIONS", 1)
    monkeypatch.setattr(time_limits, "CROWDED_SECONDS", 0.2)
    async with listening(contexts.http) as listener:
        with connect(listener.port), connect(listener.port):
            answer = await get(listener.port, client)
            assert answer.startswith(b"HTTP/1.1 503 ")  # crowded; the path is no health check
            with connect(listener.port) as third:
                with connect(listener.port) as fourth:
                    assert await until_closed(fourth) == b""
                await until_closed(third)  # sooner than the first two
        assert (await get(listener.port, client)).startswith(b"HTTP/1.1 200 ")


async def test_a_drain_ends_handshakes(contexts: TlsContexts) -> None:
    async with listening(contexts.http) as listener:
        with connect(listener.port) as connection:
            while not listener.state.connections:
                await asyncio.sleep(0)
            await listener.drain(Deadline.after(0))
            assert await until_closed(connection) == b""


async def test_new_keys_are_agreed_on_within_a_connection(contexts: TlsContexts) -> None:
    """``K`` has both sides change theirs (RFC 8446, 4.6.3)."""
    async with listening(contexts.http) as listener:
        _, output = await s_client(listener.port, "-tls1_3", "-crlf", command=b"K\n")
    assert "KEYUPDATE" in output
    assert "HTTP/1.1 200" in output


@pytest.mark.parametrize("expired", [False, True])
async def test_a_session_is_not_resumed_with_an_expired_certificate(
    expired: bool,
    mutual: TlsFiles,
    client: ssl.SSLContext,
    authority: TestAuthority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_certificate(client, authority, tmp_path)
    client.maximum_version = ssl.TLSVersion.TLSv1_2

    def connect(port: int, session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool]:
        with (
            socket.create_connection(("localhost", port), PATIENCE_SECONDS) as plain,
            client.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(GET)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            return connection.session, bool(connection.session_reused)

    async with listening(server_contexts(mutual).http) as listener:
        session, _ = await asyncio.to_thread(connect, listener.port, None)
        if expired:
            future = time.time() + 30 * 86400
            monkeypatch.setattr(transport, "time", SimpleNamespace(time=lambda: future))
            with pytest.raises((ssl.SSLError, OSError, AssertionError)):
                await asyncio.to_thread(connect, listener.port, session)
        else:
            assert (await asyncio.to_thread(connect, listener.port, session))[1]
