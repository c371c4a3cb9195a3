"""Listening sockets: binding, the connection limit, and closing without resets."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import math
import resource
import socket
import struct
import sys
import termios
from collections.abc import Callable, Collection, Iterator
from enum import Enum, auto
from typing import Any

from modelport.gateway.errors import Unavailable, plain_reason
from modelport.gateway.types import Deadline

#: While draining: time during which requests that are on their way still get an error response.
QUIET_SECONDS = 0.3
#: Time for requests that are cancelled at the deadline to send their error response.
CUT_OFF_SECONDS = 0.05
#: While draining: the same for the first request of a connection that is not older than this. A
#: client does not expect that a new connection ends without an answer, and rarely tries again.
NEWCOMER_SECONDS = 2.0
BACKLOG = 2048
#: Time for TCP handshakes in progress to complete; within one network they take less.
HANDSHAKE_SECONDS = 0.02
#: Further clients get an error that asks them to retry.
MAX_CONNECTIONS = 16_384
#: File descriptors of the process that connections may not take.
RESERVED_FILES = 256
#: Connections beyond the limit that are accepted for health checks.
HEALTH_CONNECTIONS = 64
SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python's socket module does not name it
#: Classic BPF (code, if true, if false, k): drop a segment whose flags are SYN without ACK.
_NO_NEWCOMERS = (
    (0x30, 0, 0, 13),  # load the byte of the TCP header that holds the flags
    (0x54, 0, 0, 0x12),  # mask SYN and ACK
    (0x15, 0, 1, 0x02),  # only SYN?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFF_FFFF),  # accept
)


class ListeningSocket:
    """A listening socket, whose connections get a protocol from ``make``.

    Args:
        bound: The socket, of TCP or a UNIX domain socket.
        remove: Removes the file of a UNIX domain socket, so that no further client finds it.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.BaseProtocol],
        bound: socket.socket,
        remove: Callable[[], None] = lambda: None,
    ) -> None:
        self._make = make
        self._socket = bound
        self._remove = remove
        self._spare: socket.socket | None = self._socket.dup()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        is_unix = self._socket.family == socket.AF_UNIX
        create = loop.create_unix_server if is_unix else loop.create_server
        self._server = await create(self._make, sock=self._socket, backlog=BACKLOG)

    def close(self) -> None:
        """Free the address of a listener that was not started."""
        self._remove()
        spare, self._spare = self._spare, None
        for each in (spare, self._socket):
            if each is not None:
                each.close()

    async def stop(self) -> None:
        """Stop listening without resetting a client that has just connected.

        Closing a socket resets the connections in its backlog and those in their handshake. So new
        ones are refused first, and a duplicate keeps the socket open until the others have been
        accepted.
        """
        if self._server is None:
            self.close()
        spare, self._spare = self._spare, None
        if spare is None:
            return  # already stopped
        self._remove()
        refuse_new_connections(spare)
        await asyncio.sleep(HANDSHAKE_SECONDS)
        assert self._server is not None
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
    """Use that a new connection may make of the server."""

    FREE = auto()
    #: Health checks only.
    HEALTH = auto()
    NONE = auto()


class ConnectionLimit:
    """Limit of a listener's connections, which keeps file descriptors free for other uses.

    A new descriptor gets the lowest free number, so the number of a connection's socket bounds the
    open files of the whole process. ``most`` is the limit of a listener that may use the reserved
    ones.
    """

    def __init__(self, most: int | None = None) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = files == resource.RLIM_INFINITY or most is not None
        self._files = math.inf if unlimited else max(files - RESERVED_FILES, files // 2)
        self._most = MAX_CONNECTIONS if most is None else most
        #: Whether a new connection past the limit replaces the oldest one without a request, or
        #: else the oldest one whose client is slow.
        self.replaces_waiting = most is not None

    def room(self, connections: int, number: int) -> Room:
        """Classify a new connection with descriptor ``number`` beside ``connections`` others."""
        over = max(connections - self._most, number - self._files) + 1
        if over <= 0:
            return Room.FREE
        return Room.HEALTH if over <= HEALTH_CONNECTIONS else Room.NONE


def is_reset(transport: asyncio.Transport) -> bool:
    """Whether the peer has reset a connection that is no longer read."""
    connection: socket.socket = transport.get_extra_info("socket")
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))


def untaken_bytes(transport: asyncio.Transport) -> int:
    """The bytes that the peer's kernel has not acknowledged; those of the transport, too."""
    waiting = bytearray(4)
    with contextlib.suppress(OSError, ValueError):  # it is closed
        number = transport.get_extra_info("socket").fileno()
        fcntl.ioctl(number, termios.TIOCOUTQ, waiting)
    return transport.get_write_buffer_size() + int.from_bytes(waiting, sys.byteorder)


def bind(address: str, port: int, flag: str, reuse_port: bool = False) -> socket.socket:
    """Bind a socket, and listen if the port is not shared.

    Raises:
        Unavailable: The port cannot be bound; the message names ``flag``.
    """
    shared = (socket.SO_REUSEPORT,) if reuse_port else ()
    with _naming(address, port, flag):
        listener = _bound(address, port, socket.SO_REUSEADDR, *shared)
        if not reuse_port:  # a shared port would deliver connections before READY
            try:
                listener.listen(BACKLOG)  # reports a port that is taken before the models load
            except OSError:
                listener.close()
                raise
    listener.setblocking(False)
    return listener


def reserve(address: str, port: int, flag: str) -> socket.socket:
    """Bind a port for workers, which share it.

    A socket that is bound but does not listen receives no connections, and keeps the port for this
    gateway while no worker listens, even if the system chose its number.

    Raises:
        Unavailable: The port is taken, or the address does not belong to this machine.
    """
    with _naming(address, port, flag):
        if port:  # SO_REUSEPORT alone would share the port of another gateway
            _bound(address, port, socket.SO_REUSEADDR).close()
        # Without SO_REUSEADDR no other process can bind the port before a worker listens.
        try:
            return _bound(address, port, socket.SO_REUSEPORT)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # The port is only held by connections of an earlier process in TIME_WAIT.
            return _bound(address, port, socket.SO_REUSEPORT, socket.SO_REUSEADDR)


def _bound(address: str, port: int, *options: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((address, port))
    except BaseException:
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def _naming(address: str, port: int, flag: str) -> Iterator[None]:
    """Raise ``Unavailable``, which names the option to change, for an ``OSError`` of the block."""
    try:
        yield
    except OSError as error:
        reason = plain_reason(error).lower()
        raise Unavailable(
            f"cannot listen on {address}:{port}: {reason}; choose another with {flag} or "
            f"{flag.replace('port', 'address')}"
        ) from error


def refuse_new_connections(listener: socket.socket) -> None:
    """Have the kernel drop SYN segments, so that no connection is accepted only to be reset.

    The client's kernel repeats the SYN, which is refused once the socket is closed. This uses a
    socket filter (socket(7), SO_ATTACH_FILTER).
    """
    if listener.family == socket.AF_UNIX:
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
