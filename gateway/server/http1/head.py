"""The head of an HTTP/1.1 request: its limits, and the ASGI scope that it makes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

import httptools

Headers = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 1000


class LongHead(Exception):
    """A request's head is longer than it may be."""


def bound(url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise ``LongHead`` where target and headers, each with its line's end, are too long.

    For a head that is complete: its end may have come in the segment that made it too long.
    """
    if len(url) + sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD_BYTES:
        raise LongHead


def scope(
    connection: dict[str, Any], method: str, version: str, url: bytes, headers: Headers
) -> dict[str, Any]:
    """ASGI's scope of a request; ``connection`` is what those of a connection have in common.

    Raises:
        HttpParserInvalidURLError: the target is no URL.
    """
    # ``find``: to ask bytes whether one is ``in`` them takes ten times as long.
    if url.startswith(b"/") and url.find(b"#") < 0:
        raw_path, _, query = url.partition(b"?")
    else:
        parsed = httptools.parse_url(url)
        raw_path, query = parsed.path or b"/", parsed.query or b""
    path = raw_path.decode("ascii")
    made = connection.copy()
    made["http_version"] = version
    made["method"] = method
    made["path"] = unquote(path) if "%" in path else path
    made["raw_path"] = raw_path
    made["query_string"] = query
    made["headers"] = headers
    return made


def without_offer(method: bytes, version: str, url: bytes, headers: Headers) -> bytes:
    """The head once more, without its offer to upgrade."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])
