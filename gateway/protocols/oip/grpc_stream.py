"""``ModelStreamInfer``: concurrent requests on one stream.

Responses of models that respond once keep the order of the requests, as Triton guarantees.
*Decoupled* models respond any number of times, independently of other requests. An error is sent as
a response and leaves the stream open; only the call's own deadline ends it, or any error if the
call's metadata has ``triton_grpc_error: true``.

A slow reader slows its own requests down instead of filling memory: a decoupled model computes its
next response once the last one is written, and the number of requests in progress is limited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from modelport.gateway.errors import ModelportError, TimedOut, Unavailable
from modelport.gateway.models.model_view import ModelView
from modelport.gateway.protocols.grpc_method import ERRORS_END, RefusedMessage
from modelport.gateway.protocols.oip import metadata
from modelport.gateway.runtime import request_memory
from modelport.gateway.telemetry import request_record
from modelport.gateway.telemetry.request_record import RequestRecord
from modelport.gateway.types import Deadline
from modelport.gateway.wire.proto import grpc_service_pb2 as pb

#: Limit of the requests in progress on one stream.
STREAM_WINDOW = 64
#: A timeout this close to the call's deadline is attributed to the call.
CLOCK_SECONDS = 0.05
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
FINAL_RESPONSE = "triton_final_response"


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
        running = asyncio.get_running_loop().create_task(session.run(messages))
        try:
            while (answer := await session.answers.get()) is not None:
                if isinstance(answer, BaseException):
                    raise answer
                message, size, written = answer
                session.let_go(size)  # the server counts what it sends
                yield message
                written()
        finally:
            running.cancel()
            session.cancel()

    def is_decoupled(self, message: Any) -> bool:
        try:
            number = metadata.parse_version(message.model_version)
            return self.manager.get(message.model_name, number).decoupled
        except ModelportError:  # reported by ``infer``
            return False


class _Session:
    """The state of one stream; only its event loop uses it."""

    def __init__(self, handler: StreamInfer, deadline: Deadline) -> None:
        self._handler = handler
        self._deadline = deadline
        self._errors_end = ERRORS_END.get()
        self._window = asyncio.Semaphore(STREAM_WINDOW)
        self._reader: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: Responses to write, with their size and what to call afterwards. None or an error ends
        #: the stream.
        self.answers: asyncio.Queue[tuple[Any, int, Callable[[], None]] | BaseException | None] = (
            asyncio.Queue()
        )
        #: The memory of the call, until it ends.
        self._lease = request_memory.CURRENT.get()

    async def run(self, messages: AsyncIterator[Any]) -> None:
        """Answer ``messages`` until the client ends the stream or the server shuts down."""
        closing = self._handler.manager.closing
        self._reader = reader = asyncio.get_running_loop().create_task(self._read(messages))
        closer = asyncio.ensure_future(closing.wait())
        try:
            await asyncio.wait({reader, closer}, return_when=asyncio.FIRST_COMPLETED)
            reader.cancel()
            while self._tasks:
                await asyncio.wait(self._tasks)
            if closing.is_set():
                raise Unavailable("the server is shutting down")
            await reader
            self.answers.put_nowait(None)
        except (Exception, asyncio.CancelledError) as error:
            self.answers.put_nowait(error)
        finally:
            closer.cancel()
            reader.cancel()

    def _size(self, answer: Any) -> int:
        """Reserve the memory of a response that waits for its turn.

        Raises:
            MemoryExhausted: The client does not read the earlier ones.
        """
        size: int = answer.ByteSize()
        if self._lease is not None:
            self._lease.reserve_response(size)
        return size

    def let_go(self, size: int) -> None:
        if self._lease is not None and size:
            self._lease.return_response(size)

    def cancel(self) -> None:
        self._lease = None  # the server releases it
        if self._reader is not None:
            self._reader.cancel()  # at once, or it would begin a request that has come meanwhile
        for task in self._tasks:
            task.cancel()

    async def _read(self, messages: AsyncIterator[Any]) -> None:
        loop = asyncio.get_running_loop()
        before: asyncio.Task[None] | None = None
        async for message in messages:
            await self._window.acquire()
            if type(message) is not RefusedMessage and self._handler.is_decoupled(message):
                task = loop.create_task(self._forward(message))
            else:
                task = before = loop.create_task(self._answer(message, before))
            self._tasks.add(task)
            task.add_done_callback(self._is_done)

    def _is_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.answers.put_nowait(error)

    def _is_over(self, error: ModelportError) -> bool:
        """Whether ``error`` ends the stream: any does, or it is the end of the call's time."""
        if self._errors_end:
            return True
        remaining = self._deadline.remaining()
        return isinstance(error, TimedOut) and remaining is not None and remaining < CLOCK_SECONDS

    async def _answer(self, message: Any, before: asyncio.Task[None] | None) -> None:
        """Answer a request of an ordinary model, once the one before it is answered."""
        size, record = 0, _record_of(message)
        try:
            if type(message) is RefusedMessage:
                if self._errors_end:
                    raise message.error
                answer = _refusal(message.error)
            else:
                reply = await self._handler.infer(message, self._deadline)
                reply.parameters[FINAL_RESPONSE].bool_param = True
                answer = pb.ModelStreamInferResponse(infer_response=reply)
                size = self._size(answer)
            if record is not None:
                record.response_bytes = size
            _capture(record, answer)
        except ModelportError as error:
            if record is not None:
                record.failed(str(error))
            if self._is_over(error):
                raise
            answer = _refusal(error, message.id)
            _capture(record, answer)
        finally:  # what ends the stream has its turn as well
            if record is not None:
                record.end_message()
            if before is not None and not before.done():
                await asyncio.wait({before})
        self.answers.put_nowait((answer, size, self._window.release))

    async def _forward(self, message: Any) -> None:
        """Send the responses of a decoupled model."""
        record = _record_of(message)
        try:
            ended = False
            async with aclosing(self._handler.stream(message, self._deadline)) as replies:
                async for reply in replies:
                    final = reply.parameters[FINAL_RESPONSE]
                    final.bool_param = ended = final.bool_param
                    answer = pb.ModelStreamInferResponse(infer_response=reply)
                    if record is not None:
                        record.response_bytes += reply.ByteSize()
                    _capture(record, answer)
                    await self._write(answer)
            if message.parameters[EMPTY_FINAL_RESPONSE].bool_param and not ended:
                answer = _last(message)
                _capture(record, answer)
                await self._write(answer)
        except ModelportError as error:
            if record is not None:
                record.failed(str(error))
            if self._is_over(error):
                raise
            answer = _last(message, str(error))
            _capture(record, answer)
            await self._write(answer)
        finally:
            if record is not None:
                record.end_message()
            self._window.release()

    async def _write(self, answer: Any) -> None:
        written = asyncio.Event()
        self.answers.put_nowait((answer, self._size(answer), written.set))
        await written.wait()


def _record_of(message: Any) -> RequestRecord | None:
    """Make the record of a message of the stream, in the task that answers it, if wanted."""
    stream = request_record.CURRENT.get()
    if stream is None:
        return None
    if type(message) is RefusedMessage:
        return stream.message(0)
    size = message.ByteSize()
    record = stream.message(size)
    if record.captured is not None and record.captured.fits(size):
        record.captured.received_message(message.SerializeToString())
    return record


def _capture(record: RequestRecord | None, answer: Any) -> None:
    if record is None or record.captured is None:
        return
    if record.captured.fits(answer.ByteSize()):
        record.captured.sent_message((answer.SerializeToString(),))


def _refusal(error: ModelportError, id: str = "") -> Any:
    failed = pb.ModelInferResponse(id=id)
    return pb.ModelStreamInferResponse(error_message=str(error), infer_response=failed)


def _last(message: Any, error: str = "") -> Any:
    """Make the final response to ``message``, which has no outputs."""
    answer = pb.ModelStreamInferResponse(error_message=error)
    response = answer.infer_response
    response.id, response.model_name = message.id, message.model_name
    response.model_version = message.model_version
    response.parameters[FINAL_RESPONSE].bool_param = True
    return answer
