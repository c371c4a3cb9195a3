"""Fair queueing: callers take turns at a model that has more requests than it can compute.

While several callers use a model, requests wait here, before the model's own queue, as soon as it
has enough to be busy. So a caller that sends many waits behind its own requests, and each other
caller behind one of them at a time. A caller that is alone at a model never waits here: admission
control decides about its requests.
"""

from __future__ import annotations

import asyncio
from collections import deque

from modelport.gateway.errors import QueueFull
from modelport.gateway.runtime.timer_wheel import within
from modelport.gateway.types import Deadline

#: Least number of requests that a model may have at a time before its callers take turns.
LEAST_ROOM = 32
#: Batches of every instance that keep a model busy: one is computed while the next one forms.
BATCHES = 2


class FairQueue:
    """The queue in front of one model version. Only the event loop uses it.

    Attributes:
        free: The first requests in flight at the version do not come here: nobody waits for them.
        room: Further requests that keep the model busy; others wait. As many requests of each
            caller may wait, and further ones are refused.
    """

    free = room = 0

    def __init__(self) -> None:
        self._inside = 0
        #: Requests inside, by caller.
        self._of: dict[str, int] = {}
        #: Waiting requests by caller; the first caller is the next in turn.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def resize(self, max_batch_size: int, instances: int) -> None:
        """Make room for the requests that keep ``instances`` busy."""
        room = max(LEAST_ROOM, BATCHES * max(1, max_batch_size) * instances)
        self.free = room // 2
        self.room = room - self.free

    async def enter(self, caller: str, deadline: Deadline, refuses: bool = True) -> None:
        """Wait for the caller's turn; ``leave`` ends it.

        Raises:
            QueueFull: Too many requests of the caller wait, and the queue ``refuses`` this one.
            TimedOut: The deadline came first.
        """
        inside, own = self._inside, self._of.get(caller, 0)
        if inside < self.room or (own == inside and not self._waiting):
            self._inside, self._of[caller] = inside + 1, own + 1
            return
        queue = self._waiting.setdefault(caller, deque())
        if refuses and len(queue) >= self.room:
            raise QueueFull
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await within(turn, deadline)
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.leave(caller)  # its turn came at the same moment
            else:
                self._withdraw(caller, turn)
            raise

    def leave(self, caller: str) -> None:
        """End a request, and let others in."""
        self._inside -= 1
        own = self._of[caller] - 1
        if own:
            self._of[caller] = own
        else:
            del self._of[caller]
        if self._waiting:
            self._fill()

    def _fill(self) -> None:
        """Let in requests in turn while there is room."""
        while self._waiting and self._inside < self.room:
            following = next(iter(self._waiting))
            queue = self._waiting.pop(following)
            turn = queue.popleft()
            if queue:
                self._waiting[following] = queue  # behind the others
            if not turn.done():
                self._inside += 1
                self._of[following] = self._of.get(following, 0) + 1
                turn.set_result(None)

    def _withdraw(self, caller: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(caller, deque())
        if turn in queue:
            queue.remove(turn)
        if not queue:
            self._waiting.pop(caller, None)
