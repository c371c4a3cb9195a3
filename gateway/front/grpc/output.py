"""What a connection sends: small replies together, where several are made at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.wire.raw import Buffer

#: Replies that are written together, at most.
MAX_GATHERED = 64


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
