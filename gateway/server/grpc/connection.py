"""gRPC on an HTTP/2 connection: the head of a call, and its stream."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import NamedTuple

from modelport.gateway.access import credential_headers
from modelport.gateway.access.context import Fields
from modelport.gateway.errors import ModelportError
from modelport.gateway.server import observed_requests
from modelport.gateway.server.connection_identity import identity_of
from modelport.gateway.server.grpc.service import (
    BUSY,
    CROWDED,
    CallTarget,
    Ending,
    Service,
)
from modelport.gateway.server.grpc.status import status
from modelport.gateway.server.grpc.stream import GrpcStream
from modelport.gateway.server.http1 import error_response, peer
from modelport.gateway.server.http2.connection import ServerConnection
from modelport.gateway.server.listener import Listener, ServerState
from modelport.gateway.server.listening_socket import ConnectionLimit
from modelport.gateway.server.unix_socket import UnixSocket
from modelport.gateway.wire.http2.header_blocks import FieldSection

_NO_HTTP1 = error_response.serialize(
    ("505 HTTP Version Not Supported", "this port serves gRPC: HTTP/2 with prior knowledge")
)


class GrpcHead(NamedTuple):
    """The head of a call.

    Attributes:
        http_status: The answer to a request that is not gRPC.
        headers: The fields that are not pseudo-headers.
        credential: Those that may have a credential.
    """

    target: CallTarget
    malformed: bool = False
    valid_trailers: bool = False
    content_length: int | None = None
    http_status: int | None = None
    headers: Fields = ()
    credential: tuple[bytes, ...] = ()
    path: bytes = b""


def read_head(service: Service, section: FieldSection) -> GrpcHead:
    if not section.valid_request:
        return GrpcHead(CallTarget(), True, section.valid_trailers)
    headers = dict(section.regular)
    http_status = None
    if section.pseudo[b":method"] != b"POST":
        http_status = 405
    elif not headers.get(b"content-type", b"").startswith(b"application/grpc"):
        http_status = 415
    path = section.pseudo[b":path"]
    target = service.target(path, headers)
    length, fields = section.content_length, section.regular
    credential = credential_headers.fields(fields)
    return GrpcHead(target, False, False, length, http_status, fields, credential, path)


class GrpcConnection(ServerConnection[GrpcHead, GrpcStream]):
    """A connection to ``service``.

    A call's handler starts when its request is complete, or at once where requests are streams.
    """

    def __init__(
        self, state: ServerState, service: Service, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(state, loop, partial(read_head, service))
        self.service = service

    def refuse_preface(self, data: bytes) -> bytes:
        return _NO_HTTP1 if b" HTTP/1." in data else super().refuse_preface(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._client = peer.address(transport, "peername")
        if self.service.access is not None:
            self._identity = identity_of(transport)

    def open(self, number: int, head: GrpcHead, ends: bool) -> None:
        target, context, access = head.target, None, self.service.access
        method = target.method
        if access is not None and method is not None and head.http_status is None:
            try:
                context = access.authenticate(
                    head.headers, self._identity, head.credential, method.request_streams
                ).entering(method.operation)
            except ModelportError as error:
                target = CallTarget(refusal=Ending(status(method, error), str(error)))
        call = GrpcStream(self, number, target, head.content_length, head.http_status)
        call.access = context
        if self.service.observer.active:
            call.record = observed_requests.begin_call(
                self.service.observer, head.path, head.headers, self._client
            )
            if context is not None and call.record is not None:
                call.record.caller = context.principal.name
        call.remote_closed = ends
        self.streams[number] = call
        self.state.requests.add(call)
        if head.http_status is not None:
            if ends:
                self.end_stream(call)
        elif target.method is None:
            call.end(target.refusal)
        elif self.crowded and not target.method.health:
            call.end(CROWDED)
            self.leave()
        else:
            call.begin()
            if ends:
                self.end_stream(call)
            elif target.method.request_streams:
                self.start(call)

    def start(self, call: GrpcStream) -> None:
        """Run the call's handler."""
        service = self.service
        if (
            service.overloaded
            and call.remote_closed
            and service.refuses(call.target, call.unread())
        ):
            call.end(BUSY)
            return
        context = Context()
        answer = context.run(service.start, call)
        if answer is not None:
            call.task = self.loop.create_task(answer, context=context)


class GrpcListener(Listener):
    """Serves ``service``; the other arguments are those of ``Listener``."""

    def __init__(
        self,
        service: Service,
        bound: socket.socket,
        tls: Callable[[], ssl.SSLContext] | None = None,
        unix: UnixSocket | None = None,
    ) -> None:
        state = ServerState(ConnectionLimit())

        def make() -> GrpcConnection:
            return GrpcConnection(state, service, asyncio.get_running_loop())

        super().__init__(state, make, bound, tls, unix)
