"""Type aliases of ASGI 3.0."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, nullcontext
from types import FunctionType
from typing import Any, Final, cast

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Key, in some scopes, of a dictionary that a connection's requests with the same head share.
HEAD_NOTES: Final = "modelport.head_notes"

#: Key, in the extensions of a scope, of ``ConnectionMemory.turn``.
TURN: Final = "modelport.turn"


def turn(scope: Scope) -> AbstractAsyncContextManager[None]:
    """Wait until the client takes earlier responses, before one that may be large is rendered.

    Raises:
        MemoryExhausted: Too many requests wait.
    """
    wait = scope.get("extensions", {}).get(TURN, nullcontext)
    return cast("AbstractAsyncContextManager[None]", wait())


def as_method(app: App) -> App:
    """Return the method or function that ``app`` is.

    Python calls an object with ``__call__`` by a detour that takes as long as several functions.
    """
    if isinstance(app, FunctionType):
        return app
    method: App = app.__call__  # type: ignore[operator]
    return method
