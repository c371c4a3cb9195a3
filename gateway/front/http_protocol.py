"""uvicorn's HTTP/1.1 protocol with what a front owes: a bounded head, and no surprises.

- A request's head is limited in size and in time, and a body may not stand still, so that slow or
  endless senders hold nothing.
- An offer to upgrade is ignored, as RFC 9110 (7.8) allows. httptools would otherwise drop the body
  of the request that makes the offer, and ``curl --http2`` makes it with every request.
- What is no HTTP is refused in this API's form.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 10.0
#: A body may take long, but not stand still for longer than this.
BODY_IDLE_SECONDS = 30.0
LINGER_SECONDS = 1.0
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    # Where the parser is: before or in a request's head, or in its body.
    _in_head = False
    _in_body = False
    _refused = False
    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        holds_head = not self._in_body
        if holds_head:
            head, end, body = data.partition(b"\r\n\r\n")
            if _UPGRADE.search(head):
                data = _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + body
        super().data_received(data)
        if self._in_head and not self._refused:
            self._head_bytes += len(data) if holds_head else 0
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse("431 Request Header Fields Too Large")
            elif self._timer is None:
                self._start_timer(HEAD_SECONDS)
        elif self._in_body:
            self._stop_timer()
            self._start_timer(BODY_IDLE_SECONDS)

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", msg)

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._refuse, "408 Request Timeout")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: str, reason: Any = None) -> None:
        """Answer in one piece and close; no application is involved."""
        body = b'{"error":"%s"}' % (reason or status[4:]).encode()
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if not self._refused and not self.transport.is_closing():
            self._refused = True
            self._stop_timer()
            self.transport.write(head.encode() + body)
            # Closing with bytes unread would reset the connection before the answer is seen.
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
