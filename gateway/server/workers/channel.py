"""Requests and responses between the parent and a worker: JSON on a Unix socket, both ways.

A message is its size (four bytes, big endian) and a JSON array: a request ``[id, method,
arguments]``, a result ``[id, result]``, an error ``[id, class, message, null]``, or ``[id]``, which
cancels a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
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
#: Requests whose handler is cancelled with their caller; changes go on.
_CANCELLED = ("answer",)
_CLASSES: Mapping[str, type[ModelportError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ModelportError)
}


def receive(channel: socket.socket) -> Any:
    """Wait for the first message, which is neither a request nor a response, and return it.

    Raises:
        ChannelClosed: The other end has ended.
    """
    size = channel.recv(_SIZE_BYTES, socket.MSG_WAITALL)
    length = int.from_bytes(size, "big")
    content = channel.recv(length, socket.MSG_WAITALL)
    if not length or len(content) < length:
        raise ChannelClosed("the parent process has ended")
    return orjson.loads(content)


class ChannelClosed(Unavailable):
    """The other end of the channel has ended."""


class MessageChannel:
    """One connection. ``serve`` reads it; ``ended`` is set once it is closed."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Mapping[str, Operation],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._handlers = handlers
        self._ids = itertools.count()
        #: Requests that wait for a response, by id.
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        #: Requests of the other end, by id.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.ended = asyncio.Event()
        #: Arrival of the last message, on the monotonic clock.
        self.heard_at = time.monotonic()

    async def serve(self) -> None:
        """Answer requests until the other end closes."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(_SIZE_BYTES), "big")
                message = orjson.loads(await self._reader.readexactly(size))
                self.heard_at = time.monotonic()
                self._take(message)
        except asyncio.IncompleteReadError:
            pass
        except OSError:  # the connection is lost already; asyncio reports what nobody retrieves
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        finally:
            self.ended.set()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ChannelClosed("a worker has ended"))
                    answer.exception()  # marks it as retrieved: the caller may be cancelled
            self._writer.close()

    def _take(self, message: list[Any]) -> None:
        if len(message) == 3:
            task = asyncio.get_running_loop().create_task(self._answer(*message))
            self._tasks[message[0]] = task
            task.add_done_callback(lambda _: self._tasks.pop(message[0]))
            return
        if len(message) == 1:
            if message[0] in self._tasks:
                self._tasks[message[0]].cancel()
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
        self.send(reply)

    def send(self, message: Any) -> None:
        """Send ``message``; other than requests and responses only before them, for ``receive``."""
        if not self._writer.is_closing():
            content = orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS)
            self._writer.write(len(content).to_bytes(_SIZE_BYTES, "big") + content)

    async def request(self, method: str, **arguments: Any) -> Any:
        """Send a request and wait for the response.

        Raises:
            ChannelClosed: The other end has ended.
            ModelportError: The handler raised it.
        """
        if self.ended.is_set():
            raise ChannelClosed("a worker has ended")
        number = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self.send([number, method, arguments])
            return await answer
        except asyncio.CancelledError:
            if method in _CANCELLED:
                self.send([number])
            raise
        finally:
            del self._waiting[number]

    def close(self) -> None:
        self._writer.close()


def _name_of(error: ModelportError) -> str:
    """Return the nearest class of ``modelport.gateway.errors``: the other end knows no others."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _CLASSES)
