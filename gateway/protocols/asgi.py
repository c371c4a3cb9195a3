"""Type aliases of ASGI 3.0."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from types import FunctionType
from typing import Any, Final

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Key, in some scopes, of a dictionary that a connection's requests with the same head share.
HEAD_NOTES: Final = "modelport.head_notes"


def as_method(app: App) -> App:
    """Return the method or function that ``app`` is.

    Python calls an object with ``__call__`` by a detour that takes as long as several functions.
    """
    if isinstance(app, FunctionType):
        return app
    method: App = app.__call__  # type: ignore[operator]
    return method
