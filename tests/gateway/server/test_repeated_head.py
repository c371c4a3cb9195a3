"""Heads that are not parsed again: the requests are those that the parser would have found."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelport.gateway.protocols.asgi import Receive, Scope, Send
from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.server.http1 import (
    error_response,
    head,
    protocol,
    repeated_head,
    request_parser,
)
from modelport.gateway.server.http1.protocol import HttpConnection
from modelport.gateway.server.http1.request_cycle import RequestResponseCycle
from modelport.gateway.server.http1.server_state import HttpServerState
from modelport.gateway.server.listening_socket import ConnectionLimit

BODIES = [b"", b"{}", b"[]", b"\r\n", b"\n\n", b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\r\n" * 9]
LINES = [
    b"X: x",
    b"X-Api-Key: a",
    b"X-Api-Key: b",
    b"Content-Encoding: gzip",
    b"Transfer-Encoding: chunked",
    b"Expect: 100-continue",
    b"Via: 1.1 other",
    b"Connection: close",
    b"Connection: upgrade",
    b"Upgrade: h2c",
    b"Content-Length: 2",
]


class RecordingTransport(asyncio.Transport):
    """Keeps what is written, on one end of a pair of sockets."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__({"socket": end, "peername": ("a", 1), "sockname": ("b", 2)})
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def write_eof(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def _exchange(segments: list[bytes]) -> tuple[list[tuple[Any, ...]], bool]:
    """Return the requests that the application gets, and whether the connection ends."""
    requests: list[tuple[Any, ...]] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        body = message.get("body", b"")
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        headers = list(scope["headers"])
        requests.append((scope["method"], scope["path"], headers, body, message["type"]))
        scope["headers"].append((b"added", b"by the application"))
        fields = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": b""})

    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        state = HttpServerState(application, ConnectionLimit(), (), ())
        connection = HttpConnection(state, loop)
        transport = RecordingTransport(ours)
        connection.connection_made(transport)
        for segment in segments:
            connection.data_received(segment)
            for _ in range(10):  # turns of the event loop, until every task has ended
                await asyncio.sleep(0)
        ended = connection._closing or connection._error is not None
        connection.connection_lost(None)
    return requests, ended


def exchange(segments: list[bytes]) -> tuple[list[tuple[Any, ...]], bool]:
    return asyncio.run(_exchange(segments))


def parsed(segments: list[bytes]) -> tuple[list[tuple[Any, ...]], bool]:
    """The same, where every head is parsed."""
    with patch.object(request_parser, "repeated_head", lambda *_: None):
        return exchange(segments)


def post(body: bytes, *lines: bytes, end: bytes = b"\r\n") -> bytes:
    length = b"Content-Length: %d" % len(body)
    return (
        end.join([b"POST /v2/models/m/infer HTTP/1.1", b"Host: a", *lines, length, b"", b""]) + body
    )


@st.composite
def segments(draw: Callable[..., Any]) -> list[bytes]:
    """Requests of few kinds, so that heads repeat, in segments that cut them in few places."""
    kinds = draw(
        st.lists(
            st.builds(
                lambda body, lines, end: (body, tuple(lines), end),
                st.sampled_from(BODIES),
                st.lists(st.sampled_from(LINES), max_size=2),
                st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n"]),
            ),
            min_size=1,
            max_size=3,
        )
    )
    found = []
    for body, lines, end in draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=7)):
        same_length = draw(st.sampled_from([body, body[::-1], bytes(len(body))]))
        message = post(same_length, *lines, end=end)
        message += draw(st.sampled_from([b"", b"", b"", b"\r\n", b"\n", b"GET"]))
        at = draw(st.sampled_from([0, 0, 0, 1, len(message) // 2, len(message) - 1]))
        found += [part for part in (message[:at], message[at:]) if part]
    return found


@settings(max_examples=60, deadline=None)
@given(segments())
def test_any_requests_are_those_that_the_parser_finds(segments: list[bytes]) -> None:
    assert exchange(segments) == parsed(segments)


def _heads_parsed(segments: list[bytes]) -> int:
    with patch.object(protocol.head, "scope", side_effect=head.scope) as scope:
        requests, _ = exchange(segments)
    assert len(requests) == len(segments)
    return scope.call_count


def test_a_head_is_parsed_twice_and_then_known() -> None:
    assert _heads_parsed([post(b"%d" % (i % 10), b"X: x") for i in range(9)]) == 2


@pytest.mark.parametrize(
    "lines",
    [
        [b"Content-Encoding: identity"],
        [b"Via: 1.1 other"],
        [b"Expect: 100-continue"],
    ],
)
def test_a_head_that_changes_how_the_body_is_read_is_parsed_each_time(lines: list[bytes]) -> None:
    assert _heads_parsed([post(b"{}", *lines)] * 5) == 5


def test_another_credential_is_another_head() -> None:
    keys = [b"X-Api-Key: a", b"X-Api-Key: a", b"X-Api-Key: a", b"X-Api-Key: b", b"X-Api-Key: a"]
    requests, _ = exchange([post(b"{}", key) for key in keys])
    assert [dict(headers)[b"x-api-key"] for _, _, headers, *_ in requests] == [
        b"a",
        b"a",
        b"a",
        b"b",
        b"a",
    ]


def test_a_head_whose_end_is_uncertain_is_not_kept() -> None:
    data = post(b"\r\n\r\n", end=b"\n")
    scope = {"method": "POST", "headers": [(b"content-length", b"4")]}
    assert repeated_head.repeated_head(data, data, scope) is None


@pytest.mark.parametrize("exchanged", [exchange, parsed])
def test_a_request_for_which_there_is_no_memory_is_answered(
    exchanged: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = post(bytes(4036)).replace(b"/v2/models/m/infer", b"/a")
    assert len(message) <= repeated_head.MAX_MESSAGE_BYTES
    begin, begun = HttpConnection._begin, list[RequestResponseCycle]()
    errors = list[error_response.ErrorResponse]()

    def the_third_finds_no_memory(self: HttpConnection, cycle: RequestResponseCycle) -> None:
        begun.append(cycle)
        if len(begun) == 3:
            monkeypatch.setattr(PROCESS, "limit_bytes", 0)
        begin(self, cycle)

    monkeypatch.setattr(HttpConnection, "_begin", the_third_finds_no_memory)
    monkeypatch.setattr(HttpConnection, "_send_error", lambda self, error: errors.append(error))
    requests, ended = exchanged([message] * 3)
    assert (len(requests), len(begun), ended) == (2, 3, True)
    assert errors == [error_response.SCARCE]
