"""Connections: gevent's, or the system's own where one user has the process to itself.

A lone user needs nobody to run while it waits, and waiting in the kernel instead of in gevent's
loop keeps microseconds out of every answer that are no server's.
"""

from __future__ import annotations

import socket as plain_socket
import struct
from typing import Any

from gevent import monkey, socket

#: (host, port)
Address = tuple[str, int]


class Sockets:
    """Of this process. ``lone``: set before the first connection."""

    lone = False


def address(text: str) -> Address:
    """Of ``host:port``; IPv6 in brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def connect(where: Address, timeout_seconds: float) -> Any:
    """A connected socket whose ``recv`` and ``sendall`` raise TimeoutError or BlockingIOError when
    they have waited for ``timeout_seconds``."""
    made = socket.create_connection(where, timeout_seconds)
    made.setsockopt(plain_socket.IPPROTO_TCP, plain_socket.TCP_NODELAY, 1)
    if not Sockets.lone:
        return made
    own = monkey.get_original("socket", "socket")(fileno=made.detach())
    own.setblocking(True)
    # By the kernel: Python's own time-out costs a poll() before every call.
    wait = struct.pack("ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6) or 1)
    for option in (plain_socket.SO_RCVTIMEO, plain_socket.SO_SNDTIMEO):
        own.setsockopt(plain_socket.SOL_SOCKET, option, wait)
    return own
