"""Connections under gevent, or plain ones if a single user has the process to itself.

A single user needs no other greenlet to run while it waits. Waiting in the kernel instead of in
gevent's loop saves microseconds per answer that are not the server's.
"""

from __future__ import annotations

import contextlib
import socket as plain_socket
import ssl
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from gevent import monkey, socket
from gevent.select import select

T = TypeVar("T")

#: (host, port)
Address = tuple[str, int]
#: More than the largest TLS record.
RECORD_BYTES = 1 << 15


class Sockets:
    """The sockets of this process; ``lone`` must be set before the first connection."""

    lone = False


def address(text: str) -> Address:
    """Parse ``host:port``; IPv6 addresses are in brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


class TlsSocket:
    """A TLS connection over a connected socket, under gevent or not.

    What ``readable`` reads ahead is what ``recv`` returns next.
    """

    def __init__(self, connected: Any, host: str, tls: ssl.SSLContext) -> None:
        self._socket, self.close = connected, connected.close
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._ahead: bytes | None = None
        self._until(self._tls.do_handshake)
        self._flush()

    def recv(self, size: int) -> bytes:
        if self._ahead is None:
            return self._until(partial(self._read, size))
        ahead, self._ahead = self._ahead, None
        return ahead

    def sendall(self, data: bytes) -> None:
        self._tls.write(data)
        self._flush()

    def readable(self) -> bool:
        """Whether data or the end has come; session tickets are neither."""
        while self._ahead is None and select([self._socket], [], [], 0)[0]:
            self._fill()
            with contextlib.suppress(ssl.SSLWantReadError):
                self._ahead = self._read(RECORD_BYTES)
        return self._ahead is not None

    def _read(self, size: int) -> bytes:
        try:
            return self._tls.read(size)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    def _until(self, step: Callable[[], T]) -> T:
        """Repeat ``step`` until the peer has sent enough for it."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()

    def _fill(self) -> None:
        data = self._socket.recv(RECORD_BYTES)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data:
            self._socket.sendall(data)


def readable(connection: Any) -> bool:
    """Whether ``recv`` of an idle connection would return at once."""
    if isinstance(connection, TlsSocket):
        return connection.readable()
    return bool(select([connection], [], [], 0)[0])


def connect(where: Address, timeout_seconds: float, tls: ssl.SSLContext | None = None) -> Any:
    """Connect a socket whose ``recv`` and ``sendall`` time out after ``timeout_seconds``.

    They raise ``TimeoutError`` or ``BlockingIOError``.
    """
    made = socket.create_connection(where, timeout_seconds)
    made.setsockopt(plain_socket.IPPROTO_TCP, plain_socket.TCP_NODELAY, 1)
    if Sockets.lone:
        made = _outside_gevent(made, timeout_seconds)
    if tls is None:
        return made
    try:
        return TlsSocket(made, where[0], tls)
    except BaseException:
        made.close()
        raise


def _outside_gevent(made: Any, timeout_seconds: float) -> Any:
    own = monkey.get_original("socket", "socket")(fileno=made.detach())
    own.setblocking(True)
    # The kernel's time-out: Python's own costs a poll() before every call.
    wait = struct.pack("ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6) or 1)
    for option in (plain_socket.SO_RCVTIMEO, plain_socket.SO_SNDTIMEO):
        own.setsockopt(plain_socket.SOL_SOCKET, option, wait)
    return own
