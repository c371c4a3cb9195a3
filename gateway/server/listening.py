"""A listening socket: how it is bound, and how it is closed without resetting anybody."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import resource
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterator
from enum import Enum, auto
from typing import Any

from modelport.gateway.errors import Unavailable
from modelport.gateway.types import Deadline

#: While draining: how long requests that are on their way are still given an answer, a refusal.
QUIET_SECONDS = 0.3
#: For those who are cut off at the deadline: how long they have to say so.
CUT_OFF_SECONDS = 0.05
BACKLOG = 2048
#: How long a handshake that is under way may take to end: less, on one machine or in one network.
HANDSHAKE_SECONDS = 0.02
#: A client that connects when so many are there is told to try again.
MAX_CONNECTIONS = 16_384
#: Of the process's files: connections may have the others.
RESERVED_FILES = 256
#: So many connections more are taken, to ask whether the server is live and ready.
HEALTH_CONNECTIONS = 64
SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python's socket module does not name it
#: Classic BPF (code, if true, if false, k): drop a segment whose flags are SYN without ACK.
_NO_NEWCOMERS = (
    (0x30, 0, 0, 13),  # load the byte of the TCP header that holds the flags
    (0x54, 0, 0, 0x12),  # of it SYN and ACK
    (0x15, 0, 1, 0x02),  # only SYN?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFF_FFFF),  # take
)


class Listening:
    """A port, and ``make``'s protocols on its connections.

    Args:
        flag: the one that chooses the port.
        reuse_port: other processes serve on the same port.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.BaseProtocol],
        address: str,
        port: int,
        flag: str,
        reuse_port: bool = False,
    ) -> None:
        self._make = make
        self._socket = bind(address, port, flag, reuse_port)
        self._spare: socket.socket | None = self._socket.dup()
        self.port: int = self._socket.getsockname()[1]
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._make, sock=self._socket, backlog=BACKLOG)

    async def stop(self) -> None:
        """Stop listening without resetting a client that has just connected.

        Closing a socket resets the connections in its backlog, and those whose handshake is under
        way. So nobody new is let in first, and a duplicate keeps the socket alive until the others
        have been taken in; whoever has not sent its request yet may do so.
        """
        spare, self._spare = self._spare, None
        if spare is None:
            return  # it has stopped
        refuse_newcomers(spare)
        await asyncio.sleep(HANDSHAKE_SECONDS)
        if self._server is not None:
            self._server.close()
        accepted = list(_accept_all(spare))
        spare.close()
        for connection in accepted:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(self._make, connection)


async def until_no(remaining: Collection[Any], deadline: Deadline) -> None:
    while remaining and not deadline.expired:
        await asyncio.sleep(0.01)


class Room(Enum):
    """Room for another connection."""

    FREE = auto()
    #: For questions about health alone.
    HEALTH = auto()
    NONE = auto()


class ConnectionLimit:
    """The connections that a listener may have, so that the process keeps files for other uses.

    A new file has the lowest free number: by the number of its socket a connection tells how many
    files are open, whoever opened them. ``most``: of a listener that may have reserved files.
    """

    def __init__(self, most: int | None = None) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = files == resource.RLIM_INFINITY or most is not None
        self._files = math.inf if unlimited else max(files - RESERVED_FILES, files // 2)
        self._most = MAX_CONNECTIONS if most is None else most

    def room(self, connections: int, number: int) -> Room:
        """The room for a connection whose socket is file ``number``, beside ``connections``."""
        over = max(connections - self._most, number - self._files) + 1
        if over <= 0:
            return Room.FREE
        return Room.HEALTH if over <= HEALTH_CONNECTIONS else Room.NONE


def bind(address: str, port: int, flag: str, reuse_port: bool) -> socket.socket:
    """A bound socket; it listens already where the port is not shared.

    Raises:
        Unavailable: it cannot be had; the message names ``flag``.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((address, port))
        if not reuse_port:  # else connections would come to this process before it is ready
            listener.listen(BACKLOG)  # now, so that a port taken twice is found before they come
    except OSError as error:
        listener.close()
        raise taken(address, port, flag, error.strerror or "") from error
    listener.setblocking(False)
    return listener


def taken(address: str, port: int, flag: str, reason: str) -> Unavailable:
    return Unavailable(
        f"cannot listen on {address}:{port}: {reason.lower()}; choose another with {flag} or "
        f"{flag.replace('port', 'address')}"
    )


def refuse_newcomers(listener: socket.socket) -> None:
    """Let the kernel drop what newly knocks, so that nobody is let in and then reset.

    The knock is repeated by the client's kernel, and refused once the socket is closed. A socket
    filter does it (socket(7), SO_ATTACH_FILTER); elsewhere than on Linux the window between the
    last accept and the close stays.
    """
    if not sys.platform.startswith("linux"):
        return
    instructions = b"".join(struct.pack("HBBI", *each) for each in _NO_NEWCOMERS)
    program = ctypes.create_string_buffer(instructions)
    pointer = struct.pack("HP", len(_NO_NEWCOMERS), ctypes.addressof(program))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, pointer)


def _accept_all(listener: socket.socket) -> Iterator[socket.socket]:
    with contextlib.suppress(BlockingIOError):
        while True:
            connection, _ = listener.accept()
            connection.setblocking(False)
            yield connection
