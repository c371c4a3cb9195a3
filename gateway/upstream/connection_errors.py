"""Reasons why a server gives no answer, in words that name no library."""

from __future__ import annotations

import socket

_REFUSED = "connection refused"
#: Class, by name or by itself → reason; classes of libraries that this module does not import.
_BY_NAME = {
    "ClientConnectorDNSError": "its name cannot be resolved",
    "ServerTimeoutError": "it does not respond in time",
    "ServerDisconnectedError": "it closed the connection",
    "RemoteDisconnected": "it closed the connection",
    "ClientPayloadError": "its response is truncated",
    "IncompleteRead": "its response is truncated",
    "ClientResponseError": "it does not speak HTTP",
    "HTTPException": "it does not speak HTTP",
}
_BY_CLASS: tuple[tuple[type[BaseException], str], ...] = (
    (socket.gaierror, "its name cannot be resolved"),
    (ConnectionRefusedError, _REFUSED),
    (TimeoutError, "it does not respond in time"),
    (ConnectionError, "it closed the connection"),
)


def reason(error: BaseException) -> str:
    """Return why ``error``, of any client, left a request without an answer."""
    inner = [each for each in (error, _of(error, "os_error"), _of(error, "reason")) if each]
    for one in (*inner, error.__cause__, error.__context__):
        names = [kind.__name__ for kind in type(one).__mro__]
        if found := next((_BY_NAME[name] for name in names if name in _BY_NAME), ""):
            return found
        if found := next((words for kind, words in _BY_CLASS if isinstance(one, kind)), ""):
            return found
    for one in reversed(inner):
        if isinstance(one, OSError) and one.strerror and "[" not in one.strerror:
            return one.strerror.lower()
    return "no connection can be made"


def _of(error: BaseException, attribute: str) -> BaseException | None:
    """The error that aiohttp or urllib wraps."""
    found = getattr(error, attribute, None)
    return found if isinstance(found, BaseException) else None
