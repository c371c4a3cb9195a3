"""The identity of a connection, taken from its transport when it is accepted."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import struct
import time
from collections.abc import Iterable
from typing import Any

from modelport.gateway.access.principal import CERTIFICATE_KINDS, ConnectionIdentity

#: Process, user and group (unix(7), SO_PEERCRED).
_CREDENTIALS = struct.Struct("3i")
#: A user may be renamed, or looked up at a slow server.
_USER_NAME_SECONDS = 60


def identity_of(transport: asyncio.BaseTransport) -> ConnectionIdentity:
    """Return the identity of the peer of ``transport``, whose handshake is complete."""
    peer = transport.get_extra_info("peername")
    if isinstance(peer, tuple):
        return ConnectionIdentity(peer[0], _names(transport.get_extra_info("ssl_object")))
    connection = transport.get_extra_info("socket")
    is_unix = getattr(connection, "family", None) == socket.AF_UNIX
    return ConnectionIdentity(user=_user(connection) if is_unix else "")


def _names(tls: ssl.SSLObject | None) -> tuple[str, ...] | None:
    """Return the subject alternative names of a client certificate, which has been verified.

    Each has its kind: ``dns:ci.example.com``. The result is None if they cannot be read: Python
    expects UTF-8, and an authority may sign anything.
    """
    try:
        certificate = tls.getpeercert() if tls is not None else None
    except (ValueError, ssl.SSLError):
        return None
    rows: Iterable[Any] = (certificate or {}).get("subjectAltName", ())
    return tuple(
        f"{CERTIFICATE_KINDS[kind]}:{name}" for kind, name in rows if kind in CERTIFICATE_KINDS
    )


def _user(peer: socket.socket) -> str:
    content = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _user_name(_CREDENTIALS.unpack(content)[1], int(time.monotonic() / _USER_NAME_SECONDS))


@functools.lru_cache(1024)
def _user_name(number: int, period: int) -> str:
    """Return the name of a user, or the number of one without a name; look it up each period."""
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
