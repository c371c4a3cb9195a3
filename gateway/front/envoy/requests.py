"""The requests in flight, and a watch over those that last.

pyvoy tells of a client that has gone only when it is asked: after the body's end its ``receive``
answers at once, with an empty message or with ``http.disconnect``. So what has been in flight for
a while is asked now and then. A request that is answered quickly costs an entry in a dictionary.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from gateway.protocols.asgi import Message, Receive
from gateway.types import NO_DEADLINE, Deadline

#: How often the watch looks at the requests in flight.
WATCH_SECONDS = 0.03
#: All of them together; so that thousands that wait for a slow model cost a per cent of a core.
ASKED_PER_SECOND = 500
#: A body may take long, but not stand still for longer than this.
BODY_IDLE_SECONDS = 30.0
DISCONNECT: Message = {"type": "http.disconnect"}


class Request:
    """One request, and its ``receive`` as ASGI specifies it."""

    # Class attributes are what an instance begins with: setting each costs on every request.
    #: The body is complete.
    ended = False
    #: Why the task is cancelled, if it is.
    disconnected = expired = False
    #: The body stood still and was given up.
    stalled = False
    deadline: Deadline = NO_DEADLINE
    ask_at = 0.0
    _pending: Any = None  # pyvoy's future, while somebody awaits it
    _waiting_since = 0.0
    _gone: asyncio.Future[None] | None = None

    def __init__(self, receive: Receive, task: asyncio.Task[Any]) -> None:
        self._receive, self.task = receive, task

    async def receive(self) -> Message:
        """The next part of the body; after its end, once the client has gone, ``DISCONNECT``.

        ``DISCONNECT`` too where the body is given up because it stands still: ``stalled``.
        """
        if self.ended:
            if not self.disconnected:
                self._gone = self._gone or self.task.get_loop().create_future()
                await asyncio.shield(self._gone)
            return DISCONNECT
        self._pending = pending = self._receive()
        try:
            message = await pending
        except asyncio.CancelledError:
            if not self.stalled:
                raise
            self.ended = True
            return DISCONNECT
        self._pending, self._waiting_since = None, 0.0
        if not message.get("more_body"):
            self.note(message)
        return message

    def start_receiving(self) -> asyncio.Future[Message]:
        """The next part of the body as a future, for who calls ``note`` with the last."""
        return asyncio.ensure_future(self._receive())

    def note(self, last: Message) -> None:
        """No more of the body will come."""
        self.ended = True
        self.disconnected = last["type"] == "http.disconnect"

    def leave(self) -> None:
        """The client has gone: nobody waits for the answer.

        An application that itself waits to be told so is told; any other is cancelled.
        """
        self.ended = self.disconnected = True
        if self._gone is None:
            self.task.cancel()
        elif not self._gone.done():
            self._gone.set_result(None)

    def expire(self) -> None:
        """The client's own deadline has passed."""
        if not self.expired:
            self.expired = True
            self.task.cancel()

    async def ask(self) -> None:
        """Whether the client is still there."""
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.task.done():
            self.leave()

    def watch_body(self, now: float) -> None:
        """Give up a body that stands still."""
        if self._pending is None:
            return
        if not self._waiting_since:
            self._waiting_since = now
        elif now - self._waiting_since > BODY_IDLE_SECONDS and not self.stalled:
            self.stalled = True
            self._pending.cancel()


class Requests:
    """All that are in flight. Touched by the event loop alone."""

    def __init__(self) -> None:
        self._requests: dict[Request, None] = {}  # the oldest first
        self._watching = False
        self._asking: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def enter(self, receive: Receive, task: asyncio.Task[Any]) -> Request:
        request = Request(receive, task)
        self._requests[request] = None
        if not self._watching:
            self._watching = True
            task.get_loop().call_later(WATCH_SECONDS, self._watch, task.get_loop())
        return request

    def leave(self, request: Request) -> None:
        del self._requests[request]

    def cancel(self) -> None:
        for request in list(self._requests):
            request.task.cancel()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._requests:
            self._watching = False
            return
        now = time.monotonic()
        again = max(WATCH_SECONDS, len(self._requests) / ASKED_PER_SECOND)
        for request in self._requests:
            if not request.ask_at:
                request.ask_at = now + WATCH_SECONDS
            elif not request.ended:
                request.watch_body(now)
            elif request.ask_at <= now and not request.disconnected:
                request.ask_at = now + again
                asking = loop.create_task(request.ask())
                self._asking.add(asking)
                asking.add_done_callback(self._asking.discard)
            if request.deadline.expired:
                request.expire()
        loop.call_later(WATCH_SECONDS, self._watch, loop)
