"""The sending side of a connection: small replies of one turn of the event loop in one write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from modelport.gateway.wire.raw_tensors import Buffer

#: The most replies that are written together.
MAX_REPLIES = 64
#: Up to this size, frames are copied into one piece.
COPIED_BYTES = 64 * 1024


class FrameWriter:
    """Each write to the transport is a system call, which costs as much as making a reply."""

    __slots__ = ("_gathered", "_loop", "_size", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._gathered: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Send ``data`` now, behind the replies that were gathered."""
        if self._gathered:
            self._gathered.append(data)
            self.send()
        elif not self._transport.is_closing():
            self._transport.write(data)

    def write_parts(self, parts: Sequence[Buffer], size: int) -> None:
        """Send ``size`` bytes in ``parts``, without a copy if they are large."""
        if size <= COPIED_BYTES:
            self.write(b"".join(parts))
            return
        self.send()
        if not self._transport.is_closing():
            self._transport.writelines(parts)

    def reply(self, data: bytes, last: bool) -> None:
        """Send a small reply together with the next ones, unless it is the ``last``."""
        gathered = self._gathered
        gathered.append(data)
        self._size += len(data)
        if last or len(gathered) == MAX_REPLIES or self._size > COPIED_BYTES:
            self.send()
        elif len(gathered) == 1:
            self._loop.call_soon(self.send)

    def send(self) -> None:
        """Send the replies that were gathered."""
        if self._gathered and not self._transport.is_closing():
            self._transport.write(b"".join(self._gathered))
        self._gathered.clear()
        self._size = 0
