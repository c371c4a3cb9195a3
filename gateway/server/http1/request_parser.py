"""The parser of the requests on an HTTP/1.1 connection: httptools, and its callbacks for heads."""

from __future__ import annotations

import re

import httptools

from modelport.gateway.protocols.asgi import Scope
from modelport.gateway.server.http1 import error_response
from modelport.gateway.server.http1.error_response import RefusedHead
from modelport.gateway.server.http1.repeated_head import RepeatedHead, repeated_head

Headers = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 1000
#: The parser's position: between requests, in a head, in a body.
BETWEEN, HEAD, BODY = range(3)
_NOTED = frozenset({b"host", b"via", b"content-encoding", b"expect", b"transfer-encoding"})
#: ``uri-host [ ":" port ]`` (RFC 9110, 7.2); the host of an HTTP URI is not empty (4.2.1).
_HOST = re.compile(
    rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+)(?::[0-9]{0,5})?"
)


class RequestParser:
    """Base of a connection, which has the callbacks of complete heads and of bodies.

    ``Upgrade`` is ignored, as RFC 9110 (7.8) allows; ``curl --http2`` sends it with every request.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._place = BETWEEN
        # The request being parsed.
        self._url = self._via = b""
        self._headers: Headers = []
        self._expects_continue = self._upgrades = False
        self._hosts = 0
        self._host: bytes | None = None  # the last valid Host of the connection
        self._coding = b""  # transfer codings
        self._is_plain = True  # no header changes how its body is read
        self._previous = b""  # the last request that was parsed, if it came in one piece
        self._repeated: RepeatedHead | None = None  # the head of the last two requests
        self._begun = 0  # requests that begin in this segment
        self._stray_bytes = 0  # since its head, or the last byte of its body

    def _feed(self, data: bytes | memoryview) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as error:
                if not self._upgrades:
                    return  # CONNECT: the bytes that follow are a tunnel's
                # The parser stops at the upgrade: parse the head again without it.
                data = self._without_upgrade() + bytes(data[error.args[0] :])
                self._parser = httptools.HttpRequestParser(self)

    def _without_upgrade(self) -> bytes:
        """Rebuild the head without its ``Upgrade`` header."""
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, version)]
        lines += [b"%b: %b" % header for header in self._headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _measured_head(self) -> int:
        """Return the size of a complete head: its target and its header lines."""
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def _checked_version(self) -> str:
        """Return the HTTP version of a complete head (RFC 9112, 2.3, 3.2 and 6.1).

        Raises:
            RefusedHead: The version, the number of Host headers or the transfer coding is wrong.
        """
        version: str = self._parser.get_http_version()
        if version != "1.1" and (version != "1.0" or self._coding):
            raise RefusedHead(error_response.VERSION)
        if self._hosts != 1 and (self._hosts or version == "1.1"):
            raise RefusedHead(error_response.HOST)
        if self._coding and self._coding != b"chunked":
            raise RefusedHead(error_response.CODING)
        return version

    def _keep_head(self, scope: Scope, data: bytes) -> None:
        """Keep the head of a request that came in one piece, if the one before had the same."""
        if self._is_plain:
            self._repeated = repeated_head(self._previous, data, scope)
            self._previous = data

    # -- httptools --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._place, self._stray_bytes = HEAD, 0
        self._begun += 1
        self._url, self._via, self._headers = b"", b"", []
        self._is_plain, self._repeated = True, None
        self._hosts, self._coding = 0, b""
        self._expects_continue = self._upgrades = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._place == HEAD:  # trailers are dropped
            name = name.lower()
            if name in _NOTED:
                self._note(name, value)
            self._headers.append((name, value))

    def _note(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
            if value != self._host and _HOST.fullmatch(value) is None:
                raise RefusedHead(error_response.HOST)
            self._host = value
            return
        self._is_plain = False
        if name == b"transfer-encoding":
            self._coding += value.lower()
        elif name == b"via":
            self._via += b", " + value if self._via else value
        elif name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
