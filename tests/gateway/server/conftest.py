"""These tests run on the loop that the gateway runs on, and some of them over TLS as well."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable, Mapping

import pytest
import uvloop

from modelport.gateway.server.grpc.connection import GrpcListener
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.settings import TlsFiles
from tests.certificates import TestAuthority, server_contexts


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority()


@pytest.fixture(scope="session")
def tls_files(authority: TestAuthority, tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(*authority.write(tmp_path_factory.mktemp("tls"), "server"))


@pytest.fixture(params=["clear text", "TLS"])
def transport(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    authority: TestAuthority,
    tls_files: TlsFiles,
) -> None:
    """Listeners serve, and ``asyncio.open_connection`` connects, in clear text or over TLS."""
    if request.param == "clear text":
        return
    contexts = server_contexts(tls_files)
    client = ssl.create_default_context(cadata=authority.pem.decode())
    for listener, context in ((HttpListener, contexts.http), (GrpcListener, contexts.grpc)):
        served = functools.partialmethod(listener.__init__, tls=lambda context=context: context)
        monkeypatch.setattr(listener, "__init__", served)
    connect = functools.partial(asyncio.open_connection, ssl=client)
    monkeypatch.setattr(asyncio, "open_connection", connect)
