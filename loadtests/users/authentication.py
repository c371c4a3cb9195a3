"""Credentials of the users: the token in their requests, and the context of TLS connections."""

from __future__ import annotations

import os
import ssl
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from modelport.gateway.cli import server_credentials
from modelport.gateway.cli.server_credentials import ServerCredentials
from modelport.gateway.errors import UsageError
from modelport.loadtests.load.target import LoadTestTarget

HTTP, HTTP2 = "http/1.1", "h2"


@lru_cache
def _token(credentials: ServerCredentials) -> str:
    return credentials.token()


@lru_cache
def _context(credentials: ServerCredentials, protocol: str) -> ssl.SSLContext:
    context = credentials.context()
    context.set_alpn_protocols([protocol])
    return context


def headers(target: LoadTestTarget) -> dict[str, str]:
    """Return the header with the token, if there is one. The file is read once.

    Raises:
        InvalidArgument: The token file cannot be read, or holds no token.
    """
    token = "" if target.credentials is None else _token(target.credentials)
    return {"authorization": f"Bearer {token}"} if token else {}


def context(target: LoadTestTarget, protocol: str = HTTP) -> ssl.SSLContext | None:
    """Return the context of connections to ``target``; None for clear text.

    Args:
        protocol: The protocol that the handshake chooses (ALPN).

    Raises:
        InvalidArgument: A file cannot be used.
    """
    return _context(target.credentials or ServerCredentials(), protocol) if target.tls else None


def grpc_files(target: LoadTestTarget) -> dict[str, Path | None]:
    """Return the files of a TLS channel of grpcio's, by the names of its arguments.

    grpcio does not use the system's authorities by itself.
    """
    given = target.credentials or ServerCredentials()
    system = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    return {
        "root_certificates": given.ca_file or (Path(system) if system else None),
        "private_key": given.client_key,
        "certificate_chain": given.client_cert,
    }


def grpc_credentials(target: LoadTestTarget) -> Any:
    """Return the credentials of a TLS channel of grpcio's."""
    import grpc

    files = grpc_files(target)
    return grpc.ssl_channel_credentials(
        **{name: None if path is None else path.read_bytes() for name, path in files.items()}
    )


def authenticated(target: LoadTestTarget, given: str) -> LoadTestTarget:
    """Return ``target`` with the credentials of the command at hand, which are checked.

    Files for TLS make an address without a scheme mean TLS.

    Raises:
        InvalidArgument: A file cannot be used.
        UsageError: They are files for TLS, and the URL ``given`` is clear text.
    """
    credentials = server_credentials.current().absolute()
    if credentials.needs_tls and not target.tls:
        if "://" in given:
            raise UsageError(
                f"'{given}' is clear text; with --ca-file or --client-cert "
                "give https:// or grpcs://"
            )
        target = replace(target, tls=True)
    credentials.token()
    if target.tls:
        credentials.context()
    return replace(target, credentials=credentials)
