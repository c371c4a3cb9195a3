"""``ModelStreamInfer``: concurrent requests on one stream.

Responses of models that respond once keep the order of the requests, as Triton guarantees.
*Decoupled* models respond any number of times, independently of other requests. An error is sent as
a response and leaves the stream open; only the call's own deadline ends it.

A slow reader slows its own requests down instead of filling memory: a decoupled model computes its
next response once the last one is written, and the number of requests in progress is limited.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from modelport.gateway.errors import ModelportError, TimedOut, Unavailable
from modelport.gateway.models.model_view import ModelView
from modelport.gateway.protocols.grpc_method import RefusedMessage
from modelport.gateway.protocols.oip import metadata
from modelport.gateway.types import Deadline
from modelport.gateway.wire.proto import grpc_service_pb2 as pb

#: Limit of the requests in progress on one stream.
STREAM_WINDOW = 64
#: A timeout this close to the call's deadline is attributed to the call.
CLOCK_SECONDS = 0.05
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"


@dataclass(frozen=True, slots=True)
class StreamInfer:
    """Handler of the method. ``infer`` runs ordinary models, ``stream`` decoupled ones."""

    manager: ModelView
    infer: Callable[[Any, Deadline], Awaitable[Any]]
    stream: Callable[[Any, Deadline], AsyncGenerator[Any, None]]

    async def __call__(
        self, messages: AsyncIterator[Any], deadline: Deadline
    ) -> AsyncIterator[Any]:
        """Respond to a stream of ``ModelInferRequest`` messages.

        Raises:
            Unavailable: The server is shutting down; earlier requests have been answered.
            TimedOut: The call's own deadline has passed.
            ModelportError: A message cannot be decoded.
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
                    session.written(waiting)
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
            number = metadata.parse_version(message.model_version)
            return self.manager.get(message.model_name, number).decoupled
        except ModelportError:  # reported by ``infer``
            return False


async def _cancel_after(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    await event.wait()
    task.cancel()


class _Session:
    """The state of one stream; only its event loop uses it."""

    def __init__(self, handler: StreamInfer, deadline: Deadline) -> None:
        self._handler = handler
        self._deadline = deadline
        self._window = asyncio.Semaphore(STREAM_WINDOW)
        #: Requests of ordinary models, in order.
        self._ordered: deque[asyncio.Task[Any]] = deque()
        #: Requests of decoupled models.
        self._streams: set[asyncio.Task[None]] = set()
        #: Responses to write, with a future to complete, or None to release the window.
        self.ready: deque[tuple[Any, asyncio.Future[None] | None]] = deque()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    def wake(self, _: Any = None) -> None:
        self._changed.set()

    def _is_over(self, error: ModelportError) -> bool:
        """Whether ``error`` comes from the call's deadline instead of the request's."""
        remaining = self._deadline.remaining()
        return isinstance(error, TimedOut) and remaining is not None and remaining < CLOCK_SECONDS

    def cancel(self) -> None:
        for task in (*self._ordered, *self._streams):
            task.cancel()

    async def read(self, messages: AsyncIterator[Any]) -> None:
        loop = asyncio.get_running_loop()
        async for message in messages:
            await self._window.acquire()
            if type(message) is not RefusedMessage and self._handler.is_decoupled(message):
                stream = loop.create_task(self._forward(message))
                self._streams.add(stream)
                stream.add_done_callback(self._stream_is_over)
            else:
                task = loop.create_task(self._answer(message))
                self._ordered.append(task)
                task.add_done_callback(self._keep_order)

    def is_answered(self, reader: asyncio.Task[None]) -> bool:
        """Whether the request stream has ended and every request is answered."""
        if self._failure is not None:
            raise self._failure
        return reader.done() and not (self.ready or self._ordered or self._streams)

    async def changed(self) -> None:
        """Wait until the state of a request changes."""
        await self._changed.wait()
        self._changed.clear()

    def written(self, waiting: asyncio.Future[None] | None) -> None:
        if waiting is None:
            self._window.release()
        elif not waiting.done():
            waiting.set_result(None)

    # -- ordinary models ------------------------------------------------------------------------

    async def _answer(self, message: Any) -> Any:
        if type(message) is RefusedMessage:
            return _refusal(message.error)
        try:
            reply = await self._handler.infer(message, self._deadline)
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
            async with aclosing(self._handler.stream(message, self._deadline)) as replies:
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
    """Make the final response to ``message``, which has no outputs."""
    answer = pb.ModelStreamInferResponse(error_message=error)
    response = answer.infer_response
    response.id, response.model_name = message.id, message.model_name
    response.model_version = message.model_version
    response.parameters[_FINAL].bool_param = True
    return answer
