"""What a connection sends: small replies together, where several are made at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from modelport.gateway.server.grpc import limits
from modelport.gateway.server.grpc.service import Ending
from modelport.gateway.wire import http2
from modelport.gateway.wire.http2 import MAX_WINDOW_BYTES
from modelport.gateway.wire.http2_reader import MAX_DATA_BYTES
from modelport.gateway.wire.raw import Buffer

#: What a call may send before it is read.
STREAM_WINDOW_BYTES = 1024 * 1024
#: Replies that are written together, at most.
MAX_GATHERED = 64
GREETING = http2.settings(
    (http2.MAX_CONCURRENT_STREAMS, limits.MAX_STREAMS),
    (http2.INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES),
    (http2.MAX_FRAME_SIZE, MAX_DATA_BYTES),
    (http2.MAX_HEADER_LIST_SIZE, http2.MAX_HEADER_BYTES),
) + http2.window_update(0, MAX_WINDOW_BYTES - http2.WINDOW_BYTES)
_SAID = b'{"error":"this port serves gRPC: HTTP/2 with prior knowledge"}'
NO_HTTP1 = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_SAID), _SAID)
)

#: Of endings as they are sent: in an overload most are alike.
KEPT_ENDINGS = 64


@lru_cache(KEPT_ENDINGS)
def block_of(ending: Ending) -> bytes:
    """The header block of ``ending``."""
    return b"".join(http2.literal(*field) for field in ending.fields())


class Output:
    """Each write to the transport is a system call, which costs as much as making a reply."""

    __slots__ = ("_gathered", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._gathered: list[bytes] = []

    def write(self, data: bytes) -> None:
        if self._gathered:
            self._gathered.append(data)
            self.send()
        else:
            self._transport.write(data)

    def write_parts(self, parts: Sequence[Buffer]) -> None:
        """Something large, from where it lies."""
        self.send()
        self._transport.writelines(parts)

    def reply(self, data: bytes, last: bool) -> None:
        """A whole, small reply, in one piece with others of this turn of the loop.

        ``last``: there is no other to wait for.
        """
        gathered = self._gathered
        gathered.append(data)
        if last or len(gathered) == MAX_GATHERED:
            self.send()
        elif len(gathered) == 1:
            self._loop.call_soon(self.send)

    def send(self) -> None:
        """What is gathered."""
        if self._gathered and not self._transport.is_closing():
            self._transport.write(b"".join(self._gathered))
        self._gathered.clear()
