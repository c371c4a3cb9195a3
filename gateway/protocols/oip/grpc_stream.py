"""``ModelStreamInfer``: requests of one stream are worked on together.

Models that answer once are answered in the order asked, as Triton guarantees. Those that are
*decoupled* answer any number of times, each on its own: a long answer holds up nobody else's.
An error goes into its answer, and the stream stays open; the end of its own time ends it.

A client that reads slowly holds its requests up, not the memory: a decoupled model is asked for its
next response when the last one is written, and only so many requests are in progress.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from modelport.gateway.errors import ModelportError, TimedOut, Unavailable
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.protocols.grpc_method import RefusedMessage
from modelport.gateway.protocols.oip import documents
from modelport.gateway.types import Deadline
from modelport.gateway.wire.triton_messages import service_pb2 as pb

#: Requests of one stream that may be in progress.
STREAM_WINDOW = 64
#: A timeout this close to the call's deadline is that deadline.
CLOCK_SECONDS = 0.05
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"


@dataclass(frozen=True, slots=True)
class StreamInfer:
    """The method's handler. ``infer`` gives the one answer, ``stream`` a decoupled model's."""

    manager: ModelManager
    infer: Callable[[Any, Deadline], Awaitable[Any]]
    stream: Callable[[Any, Deadline], AsyncGenerator[Any, None]]

    async def __call__(
        self, messages: AsyncIterator[Any], deadline: Deadline
    ) -> AsyncIterator[Any]:
        """Answers to ``messages``, ``ModelInferRequest``s.

        Raises:
            Unavailable: the server is shutting down; what was asked before is answered.
            TimedOut: the call's own deadline has passed.
            ModelportError: what came is no message.
        """
        session = _Session(self, deadline)
        loop = asyncio.get_running_loop()
        reader = loop.create_task(session.read(messages))
        reader.add_done_callback(session.wake)
        closing = self.manager.closing
        closer = loop.create_task(_cancel_after(closing, reader))
        try:
            while True:
                while session.ready:
                    answer, waiting = session.ready.popleft()
                    yield answer
                    session.is_written(waiting)
                if session.is_answered(reader):
                    break
                await session.changed()
            if closing.is_set():
                raise Unavailable("the server is shutting down")
            await reader
        finally:
            closer.cancel()
            reader.cancel()
            session.cancel()

    def is_decoupled(self, message: Any) -> bool:
        try:
            number = documents.parse_version(message.model_version)
            return self.manager.get(message.model_name, number).decoupled
        except ModelportError:  # its answer says so
            return False


async def _cancel_after(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    await event.wait()
    task.cancel()


class _Session:
    """One stream. Used on its event loop only."""

    def __init__(self, asked: StreamInfer, deadline: Deadline) -> None:
        self._asked = asked
        self._deadline = deadline
        self._window = asyncio.Semaphore(STREAM_WINDOW)
        #: Those that answer once, in the order asked.
        self._ordered: deque[asyncio.Task[Any]] = deque()
        #: Those of decoupled models.
        self._streams: set[asyncio.Task[None]] = set()
        #: What is to be written, and who waits until it is; None: its place becomes free.
        self.ready: deque[tuple[Any, asyncio.Future[None] | None]] = deque()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    def wake(self, _: Any = None) -> None:
        self._changed.set()

    def _is_over(self, error: ModelportError) -> bool:
        """Whether ``error`` is the end of the call's time, not of one request's."""
        remaining = self._deadline.remaining()
        return isinstance(error, TimedOut) and remaining is not None and remaining < CLOCK_SECONDS

    def cancel(self) -> None:
        for task in (*self._ordered, *self._streams):
            task.cancel()

    async def read(self, messages: AsyncIterator[Any]) -> None:
        loop = asyncio.get_running_loop()
        async for message in messages:
            await self._window.acquire()
            if type(message) is not RefusedMessage and self._asked.is_decoupled(message):
                stream = loop.create_task(self._forward(message))
                self._streams.add(stream)
                stream.add_done_callback(self._stream_is_over)
            else:
                task = loop.create_task(self._answer(message))
                self._ordered.append(task)
                task.add_done_callback(self._keep_order)

    def is_answered(self, reader: asyncio.Task[None]) -> bool:
        """Whether nothing is read any more, and all of it answered."""
        if self._failure is not None:
            raise self._failure
        return reader.done() and not (self.ready or self._ordered or self._streams)

    async def changed(self) -> None:
        """Wait until there may be more to write, or nothing."""
        await self._changed.wait()
        self._changed.clear()

    def is_written(self, waiting: asyncio.Future[None] | None) -> None:
        if waiting is None:
            self._window.release()
        elif not waiting.done():
            waiting.set_result(None)

    # -- models that answer once ----------------------------------------------------------------

    async def _answer(self, message: Any) -> Any:
        if type(message) is RefusedMessage:
            return _refusal(message.error)
        try:
            reply = await self._asked.infer(message, self._deadline)
        except ModelportError as error:
            if self._is_over(error):
                raise
            return _refusal(error, message.id)
        reply.parameters[_FINAL].bool_param = True
        return pb.ModelStreamInferResponse(infer_response=reply)

    def _keep_order(self, _: Any) -> None:
        ordered = self._ordered
        while ordered and ordered[0].done():
            task = ordered.popleft()
            if task.cancelled():
                continue
            if (error := task.exception()) is not None:
                self._failure = error
            else:
                self.ready.append((task.result(), None))
        self._changed.set()

    # -- decoupled models -----------------------------------------------------------------------

    async def _forward(self, message: Any) -> None:
        try:
            async with aclosing(self._asked.stream(message, self._deadline)) as replies:
                async for reply in replies:
                    reply.parameters[_FINAL].bool_param = False
                    await self._write(pb.ModelStreamInferResponse(infer_response=reply))
        except ModelportError as error:
            if self._is_over(error):
                raise
            await self._write(_last(message, str(error)))
            return
        if message.parameters[EMPTY_FINAL_RESPONSE].bool_param:
            await self._write(_last(message))

    async def _write(self, answer: Any) -> None:
        written = asyncio.get_running_loop().create_future()
        self.ready.append((answer, written))
        self._changed.set()
        await written

    def _stream_is_over(self, task: asyncio.Task[None]) -> None:
        self._streams.discard(task)
        self._window.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
        self._changed.set()


def _refusal(error: ModelportError, id: str = "") -> Any:
    failed = pb.ModelInferResponse(id=id)
    return pb.ModelStreamInferResponse(error_message=str(error), infer_response=failed)


def _last(message: Any, error: str = "") -> Any:
    """What ends the responses to ``message``: no outputs, and the flag."""
    answer = pb.ModelStreamInferResponse(error_message=error)
    response = answer.infer_response
    response.id, response.model_name = message.id, message.model_name
    response.model_version = message.model_version
    response.parameters[_FINAL].bool_param = True
    return answer
