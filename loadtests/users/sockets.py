"""Connections under gevent, or plain ones if a single user has the process to itself.

A single user needs no other greenlet to run while it waits. Waiting in the kernel instead of in
gevent's loop saves microseconds per answer that are not the server's.
"""

from __future__ import annotations

import socket as plain_socket
import struct
from typing import Any

from gevent import monkey, socket

#: (host, port)
Address = tuple[str, int]


class Sockets:
    """The sockets of this process; ``lone`` must be set before the first connection."""

    lone = False


def address(text: str) -> Address:
    """Parse ``host:port``; IPv6 addresses are in brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def connect(where: Address, timeout_seconds: float) -> Any:
    """Connect a socket whose ``recv`` and ``sendall`` time out after ``timeout_seconds``.

    They raise ``TimeoutError`` or ``BlockingIOError``.
    """
    made = socket.create_connection(where, timeout_seconds)
    made.setsockopt(plain_socket.IPPROTO_TCP, plain_socket.TCP_NODELAY, 1)
    if not Sockets.lone:
        return made
    own = monkey.get_original("socket", "socket")(fileno=made.detach())
    own.setblocking(True)
    # The kernel's time-out: Python's own costs a poll() before every call.
    wait = struct.pack("ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6) or 1)
    for option in (plain_socket.SO_RCVTIMEO, plain_socket.SO_SNDTIMEO):
        own.setsockopt(plain_socket.SOL_SOCKET, option, wait)
    return own
