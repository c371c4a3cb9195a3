"""Requests and answers between the parent and a worker: JSON on a Unix socket, both ways at once.

A message is its size (four bytes, big endian) and a JSON value: ``[id, method, arguments]`` asks,
``[id, answer]`` answers, ``[id, error's class, its message, null]`` refuses.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from modelport.gateway import errors
from modelport.gateway.errors import Internal, ModelportError, Unavailable

if TYPE_CHECKING:
    from modelport.gateway.models.control import Operation

log = structlog.get_logger("modelport.workers")

_SIZE_BYTES = 4
_CLASSES: Mapping[str, type[ModelportError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ModelportError)
}


class Gone(Unavailable):
    """The other end of the channel has ended."""


class Channel:
    """One connection. ``serve`` reads it; ``ended`` is set when there is nothing more to come."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Mapping[str, Operation],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._handlers = handlers
        self._ids = itertools.count()
        #: Requests that await their answer.
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.ended = asyncio.Event()
        #: When the last message came, on the monotonic clock.
        self.heard_at = time.monotonic()

    async def serve(self) -> None:
        """Answer what is asked, until the other end is gone."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(_SIZE_BYTES), "big")
                message = orjson.loads(await self._reader.readexactly(size))
                self.heard_at = time.monotonic()
                self._take(message)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.ended.set()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(Gone("a worker has ended"))
                    answer.exception()  # whoever waits no longer need not hear of it
            self._writer.close()

    def _take(self, message: list[Any]) -> None:
        if len(message) == 3:
            task = asyncio.get_running_loop().create_task(self._answer(*message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        answer = self._waiting.get(message[0])
        if answer is None or answer.done():
            return
        if len(message) == 2:
            answer.set_result(message[1])
        else:
            answer.set_exception(_CLASSES.get(message[1], Internal)(message[2]))
            answer.exception()

    async def _answer(self, number: int, method: str, arguments: dict[str, Any]) -> None:
        try:
            reply = [number, await self._handlers[method](arguments)]
        except ModelportError as error:
            reply = [number, _name_of(error), str(error), None]
        except Exception:
            log.exception("an operation failed", operation=method)
            reply = [number, Internal.__name__, "internal error", None]
        self._send(reply)

    def _send(self, message: list[Any]) -> None:
        if not self._writer.is_closing():
            content = orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS)
            self._writer.write(len(content).to_bytes(_SIZE_BYTES, "big") + content)

    async def request(self, method: str, **arguments: Any) -> Any:
        """What the other end answers, for as long as it lives.

        Raises:
            Gone: it has ended.
            ModelportError: as it raised it.
        """
        if self.ended.is_set():
            raise Gone("a worker has ended")
        number = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send([number, method, arguments])
            return await answer
        finally:
            del self._waiting[number]

    def close(self) -> None:
        self._writer.close()


def _name_of(error: ModelportError) -> str:
    """The nearest class of ``modelport.gateway.errors``: others are not known to the other end."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _CLASSES)
