"""Fair queueing: principals take turns at a model that has more requests than it can compute.

While several principals use a model, requests wait here, before the model's own queue, as soon as
it has enough to be busy. So a principal that sends many waits behind its own requests, and each
other principal behind one of them at a time. A principal that is alone at a model never waits here:
admission control decides about its requests.
"""

from __future__ import annotations

import asyncio
from collections import deque

from modelport.gateway.errors import QueueFull, TimedOut
from modelport.gateway.runtime.timer_wheel import TimeLimit
from modelport.gateway.types import Deadline


class FairQueue:
    """The queue in front of one model version. Only the event loop uses it.

    Args:
        room: Requests that keep the model busy; the others wait. As many requests of each principal
            may wait, and further ones are refused.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._inside = 0
        #: Requests inside, by principal.
        self._of: dict[str, int] = {}
        #: Waiting requests by principal; the first principal is the next in turn.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def admits(self, principal: str) -> bool:
        """Let a request in at once, if it need not wait."""
        inside = self._inside
        if inside >= self._room and (self._waiting or self._of.get(principal, 0) != inside):
            return False
        self._admit(principal)
        return True

    async def enter(self, principal: str, deadline: Deadline) -> None:
        """Wait for the principal's turn; ``leave`` ends it.

        Raises:
            QueueFull: Too many requests of the principal wait.
            TimedOut: The deadline came first.
        """
        if self.admits(principal):
            return
        queue = self._waiting.setdefault(principal, deque())
        if len(queue) >= self._room:
            raise QueueFull
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await _until(turn, deadline)
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.leave(principal)  # its turn came at the same moment
            else:
                self._withdraw(principal, turn)
            raise

    def leave(self, principal: str) -> None:
        """End a request, and let others in."""
        self._inside -= 1
        self._of[principal] -= 1
        if not self._of[principal]:
            del self._of[principal]
        while self._waiting and self._inside < self._room:
            following = next(iter(self._waiting))
            queue = self._waiting.pop(following)
            turn = queue.popleft()
            if queue:
                self._waiting[following] = queue  # behind the others
            if not turn.done():
                self._admit(following)
                turn.set_result(None)

    def _admit(self, principal: str) -> None:
        self._inside += 1
        self._of[principal] = self._of.get(principal, 0) + 1

    def _withdraw(self, principal: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(principal, deque())
        if turn in queue:
            queue.remove(turn)
        if not queue:
            self._waiting.pop(principal, None)


async def _until(turn: asyncio.Future[None], deadline: Deadline) -> None:
    remaining = deadline.remaining()
    if remaining is None:
        await turn
        return
    limit = TimeLimit(remaining)
    try:
        with limit:
            await turn
    except TimeoutError:
        raise TimedOut from None
