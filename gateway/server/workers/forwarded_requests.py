"""HTTP requests to the parent's listener that a worker answers, over the channel between them."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from modelport.gateway.access.principal import ConnectionIdentity
from modelport.gateway.errors import ModelportError, Unavailable, Unsupported
from modelport.gateway.protocols.http_message import Handler, HttpRequest, HttpResponse, Peer
from modelport.gateway.protocols.http_response import refusal
from modelport.gateway.runtime import request_memory
from modelport.gateway.runtime.request_memory import ConnectionMemory, Lease
from modelport.gateway.server.workers.coordinator import Coordinator
from modelport.gateway.types import finished
from modelport.gateway.wire import via_header
from modelport.gateway.wire.raw_tensors import Buffer

#: Size limit of bodies, which become text in one message.
MAX_BYTES = 16 * 1024 * 1024
TOO_LARGE = f"a body has at most {MAX_BYTES} bytes on this port; use the HTTP port"


class ForwardedRequests:
    """The handler in the parent. A worker that does not respond gets no request."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        body = await request.body.read(MAX_BYTES)
        if len(body) > MAX_BYTES:
            return refusal(413, TOO_LARGE)
        workers = [each for each in self._coordinator.joined() if each.silent_seconds is None]
        if not workers:
            return refusal(503, "no worker responds")
        try:
            request_memory.reserve(2 * len(body))  # as text, and in the message
            answer = await self._coordinator.until_hung(
                random.choice(workers), "answer", **_document(request, body)
            )
        except ModelportError as error:
            return refusal(503 if isinstance(error, Unavailable) else 500, str(error))
        headers = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in answer[1]]
        return HttpResponse(answer[0], base64.b64decode(answer[2]), headers)


def _document(request: HttpRequest, body: Buffer) -> dict[str, Any]:
    target = request.raw_path + (b"?" + request.query if request.query else b"")
    peer = request.peer
    return {
        "head": [request.method, target.decode("latin-1"), request.version],
        "headers": [[n.decode("latin-1"), text.decode("latin-1")] for n, text in request.headers],
        "peer": [peer.scheme, peer.client, peer.server, asdict(peer.identity)],
        "body": base64.b64encode(body).decode(),
        "via": via_header.CURRENT.get(),
    }


class _ReceivedBody:
    """A body that is complete."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def whole(self) -> Buffer | None:
        return self._content

    async def read(self, most: int) -> Buffer:
        return self._content


class RequestReceiver:
    """Has ``handler`` answer the requests in a worker."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def answer(
        self, head: list[str], headers: list[list[str]], peer: list[Any], body: str, via: str
    ) -> list[Any]:
        """Answer a request: status, headers and body.

        Raises:
            MemoryExhausted: There is no memory for the request.
            Unsupported: The response is too large.
        """
        content = base64.b64decode(body)
        memory = ConnectionMemory(request_memory.PROCESS)
        lease = Lease(memory)
        request_memory.CURRENT.set(lease)
        via_header.CURRENT.set(via)
        method, target, version = head
        fields = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in headers]
        request = HttpRequest(
            *(method, target.encode("latin-1"), fields, version),
            _peer(memory, *peer),
            _ReceivedBody(content),
        )
        try:
            lease.reserve(len(content))
            if via_header.loops(via.encode("latin-1")):
                response = refusal(508, via_header.MESSAGE)
            else:
                response = await finished(self._handler(request))
            sent = [[n.decode("latin-1"), text.decode("latin-1")] for n, text in response.headers]
            return [response.status, sent, base64.b64encode(await _whole(response)).decode()]
        finally:
            lease.release()


def _peer(
    memory: ConnectionMemory, scheme: str, client: Any, server: Any, identity: Mapping[str, Any]
) -> Peer:
    names = identity["certificate_names"]
    known = {**identity, "certificate_names": None if names is None else tuple(names)}
    ends = [None if each is None else (each[0], each[1]) for each in (client, server)]
    return Peer(scheme, ends[0], ends[1], ConnectionIdentity(**known), memory)


async def _whole(response: HttpResponse) -> bytes:
    """The body of a response, which may be a stream."""
    content = bytearray(response.body)
    if response.parts is not None:
        async with aclosing(response.parts) as parts:
            async for part in parts:
                content += part
                if len(content) > MAX_BYTES:
                    break
    if len(content) > MAX_BYTES:
        raise Unsupported(TOO_LARGE)
    return bytes(content)
