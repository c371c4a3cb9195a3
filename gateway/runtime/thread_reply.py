"""The reply of a thread to a coroutine that waits for it."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


def settle(reply: asyncio.Future[T], result: T | BaseException) -> None:
    """Give ``reply`` its result or exception, unless nobody waits for it any more."""
    if reply.done():
        return
    if isinstance(result, BaseException):
        reply.set_exception(result)
    else:
        reply.set_result(result)
