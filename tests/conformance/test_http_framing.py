"""Heads of HTTP/1.1 that are wrong or ambiguous (RFC 9110, 9112), as request smuggling uses them.

Each case differs from a good request in one place.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance import wire
from tests.conformance.wire import KeptConnection
from tests.server import Gateway

HOST = b"Host: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def get(
    version: bytes = b" HTTP/1.1", head: bytes = HOST, target: bytes = b"/v2/health/live"
) -> bytes:
    return b"GET " + target + version + b"\r\n" + head + b"\r\n"


def post(
    head: bytes = HOST, length: bytes = b"Content-Length: 2\r\n", body: bytes = b"{}"
) -> bytes:
    return b"POST /v2/repository/index HTTP/1.1\r\n" + head + length + b"\r\n" + body


def chunks(length: bytes = CHUNKED, body: bytes = b"2\r\n{}\r\n0\r\n\r\n") -> bytes:
    return post(length=length, body=body)


def coded(*codings: bytes) -> bytes:
    return chunks(b"".join(b"Transfer-Encoding: %b\r\n" % coding for coding in codings))


GOOD = {
    "a GET": get(),
    "a POST": post(),
    "chunks": chunks(),
    "chunks in capitals": coded(b"CHUNKED"),
    "HTTP/1.0 without a host": get(b" HTTP/1.0", b""),
    "empty lines before": b"\r\n\r\n" + get(),
    "an absolute target": get(target=b"http://a/v2/health/live"),
    **{
        f"host {host.decode()}": get(head=b"Host: %b\r\n" % host)
        for host in (b"A.example:80", b"[::1]:8000", b"[::1]", b"my_service", b"a%20b", b"a:")
    },
}
BAD = {
    "no host": get(head=b""),
    "an absolute target without a host": get(head=b"", target=b"http://a/v2/health/live"),
    "the same host twice": get(head=HOST + HOST),
    "two hosts": get(head=HOST + b"host: b\r\n"),
    "two hosts of HTTP/1.0": get(b" HTTP/1.0", HOST + HOST),
    **{
        f"host '{host.decode('latin-1')}'": get(head=b"Host: %b\r\n" % host)
        for host in (
            b"",
            b"a b",
            b"u@a",
            b"a/b",
            b"a:x",
            b"a, b",
            b"[::1",
            b"a:123456",
            b"\xe4",
            b"%2",
        )
    },
    **{
        f"version '{version.decode()}'": get(version)
        for version in (
            *(b"", b" HTTP/0.9", b" HTTP/1.2", b" HTTP/2.0", b" HTTP/3.0", b" HTTP/9.9"),
            *(b" http/1.1", b" HTTP/1", b" HTTP/1.10", b" HTTP/1.1 "),
        )
    },
    "no version and no host": get(b"", b""),
    "a length and chunks": chunks(b"Content-Length: 2\r\n" + CHUNKED),
    "chunks and a length": chunks(CHUNKED + b"Content-Length: 2\r\n"),
    "chunks of HTTP/1.0": chunks().replace(b"HTTP/1.1", b"HTTP/1.0"),
    "chunks twice": coded(b"chunked", b"chunked"),
    "chunks twice in a line": coded(b"chunked, chunked"),
    "chunks before another coding": coded(b"chunked, gzip"),
    "no coding": coded(b""),
    "two lengths": post(length=b"Content-Length: 2\r\nContent-Length: 3\r\n"),
    "the same length twice": post(length=b"Content-Length: 2\r\nContent-Length: 2\r\n"),
    **{
        f"length '{length.decode()}'": post(length=b"Content-Length: %b\r\n" % length)
        for length in (b"", b"2, 2", b"+2", b"-2", b"0x2", b"2_0", b"2 0", b"9" * 30)
    },
    "a folded header": get(head=HOST + b"X: a\r\n b\r\n"),
    "a fold at once": get(head=b" X: a\r\n" + HOST),
    "a space before the colon": get(head=HOST + b"X : a\r\n"),
    "a space before the colon of the length": post(length=b"Content-Length : 2\r\n"),
    "a header without a name": get(head=HOST + b": a\r\n"),
    "a header without a colon": get(head=HOST + b"X\r\n"),
    "a header's name with a bracket": get(head=HOST + b"X(: a\r\n"),
    "a NUL": get(head=HOST + b"X: a\0b\r\n"),
    "a bare CR": get(head=HOST + b"X: a\rb\r\n"),
    "a bare LF": get(head=HOST + b"X: a\n"),
    "bare LFs alone": get().replace(b"\r\n", b"\n"),
    "a bare CR behind the request line": b"GET /v2 HTTP/1.1\r" + HOST + b"\r\n",
    "a tab in the request line": get().replace(b" ", b"\t", 1),
    **{
        f"chunk {body!r}": chunks(body=body)
        for body in (
            *(b"2\n{}\r\n0\r\n\r\n", b"2\r\n{}\n0\r\n\r\n", b"2 \r\n{}\r\n0\r\n\r\n"),
            *(b"0x2\r\n{}\r\n0\r\n\r\n", b"-2\r\n{}\r\n0\r\n\r\n", b"1\r\n{}\r\n0\r\n\r\n"),
            *(b"f" * 17 + b"\r\n{}\r\n0\r\n\r\n", b"\r\n{}\r\n0\r\n\r\n"),
        )
    },
}
UNKNOWN_CODINGS = (
    *((b"gzip, chunked",), (b"gzip", b"chunked"), (b"gzip",), (b"identity",), (b"xchunked",)),
    *((b"chunked;q=1",), (b"\x0bchunked",)),
)


def statuses(gateway: Gateway, *requests: bytes) -> tuple[int, Any]:
    """The status of the first response, and its JSON; a good request follows at once."""
    reply = wire.send_bytes(gateway.http, b"".join(requests) + get(), timeout_seconds=5)
    assert reply is not None
    return reply.status, json.loads(reply.body)


@pytest.mark.parametrize("case", GOOD)
def test_a_good_head_is_served(gateway: Gateway, case: str) -> None:
    assert statuses(gateway, GOOD[case])[0] == 200


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_or_ambiguous_head_is_refused(gateway: Gateway, case: str) -> None:
    status, body = statuses(gateway, BAD[case])
    assert (status, list(body)) == (400, ["error"])


@pytest.mark.parametrize("codings", UNKNOWN_CODINGS)
def test_another_transfer_coding_is_not_implemented(
    gateway: Gateway, codings: tuple[bytes, ...]
) -> None:
    status, body = statuses(gateway, coded(*codings))
    assert status in ((501,) if b"\x0b" not in codings[0] else (400, 501)), body


def test_405_names_the_methods_of_every_path(gateway: Gateway) -> None:
    """The path with the most literal text decides: ``/models/m/invoke`` is no version."""
    connection = KeptConnection(gateway.http)
    paths = connection.send("GET", "/openapi.json").json["paths"]
    assert len(paths) > 50
    given = {"{model}": "x2", "{version}": "1", "{label}": "stable", "{region}": "r"}
    for path, operations in paths.items():
        asked = path
        for name, value in given.items():
            asked = asked.replace(name, value)
        for method in ("PATCH", "TRACE", "PUT", "DELETE"):
            if method.lower() not in operations:
                reply = connection.send(method, asked)
                assert reply.status == 405, (method, path)
                assert set(reply.headers["allow"].lower().split(", ")) == set(operations), path
                assert reply.headers["content-type"] == "application/json"
    connection.close()
