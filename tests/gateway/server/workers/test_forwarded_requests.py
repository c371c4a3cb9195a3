"""Requests to the metrics port that a worker answers."""

from __future__ import annotations

import json

import pytest

from modelport.gateway.access.principal import ConnectionIdentity
from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse, Peer
from modelport.gateway.runtime import request_memory
from modelport.gateway.server.workers import forwarded_requests
from modelport.gateway.server.workers.forwarded_requests import RequestReceiver
from modelport.gateway.wire import via_header


@pytest.mark.parametrize(
    ("via", "status"),
    [("1.1 modelport-other", 200), (f"1.1 {via_header.OWN}", 508)],
    ids=("of another one", "its own"),
)
async def test_a_worker_knows_the_gateways_before_it_and_ends_a_loop(via: str, status: int) -> None:
    peer = Peer("http", None, None, ConnectionIdentity(), request_memory.PROCESS.connection())
    body = forwarded_requests._ReceivedBody(b"")
    request = HttpRequest("POST", b"/v2/models/m/infer?a", [], "1.1", peer, body)
    seen = []

    def handler(request: HttpRequest) -> HttpResponse:
        seen.append((request.path, request.query, via_header.onward("1.1")))
        return HttpResponse(200)

    via_header.CURRENT.set(via)
    document = json.loads(json.dumps(forwarded_requests._document(request, b"")))
    via_header.CURRENT.set("")
    answer = await RequestReceiver(handler).answer(**document)
    assert answer[0] == status
    onward = ("/v2/models/m/infer", b"a", f"{via}, 1.1 {via_header.OWN}")
    assert seen == ([onward] if status == 200 else [])
