"""The slots of an instance: the strategies by which requests of several sequences run together.

``oldest`` leaves that to a ``Batcher``. ``direct`` runs a batch of all slots, in the order of their
numbers, so that a model finds a sequence in the same row each time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

from modelport.gateway.backends.capabilities import BoundInstance, Outcome
from modelport.gateway.inference.batching.execution import BatchRunner
from modelport.gateway.inference.batching.joining import Joiner
from modelport.gateway.inference.batching.queue import QueuedRequest
from modelport.gateway.inference.batching.sequence_batching import SequenceSettings
from modelport.gateway.inference.batching.sequence_tensors import SequenceTensors
from modelport.gateway.inference.batching.sequences import LiveSequence, SequenceScheduler
from modelport.gateway.types import NO_DEADLINE, Deadline, Infer, InferRequest, InferResponse


class StreamedSlots:
    """The slots of a decoupled model, which runs requests one by one."""

    def __init__(self, scheduler: SequenceScheduler, bound: BoundInstance) -> None:
        self._scheduler, self.bound = scheduler, bound

    def place(self, sequence: LiveSequence) -> None:
        if sequence.queue and sequence.running is None:
            self._scheduler.begin(sequence)

    def leave(self, number: int) -> None:
        """Nothing to do."""


class OldestSlots:
    """The slots of the strategy ``oldest``, in front of a batcher."""

    def __init__(self, scheduler: SequenceScheduler, bound: BoundInstance, infer: Infer) -> None:
        self._scheduler, self.bound, self._infer = scheduler, bound, infer
        self._tasks: set[asyncio.Task[None]] = set()

    def place(self, sequence: LiveSequence) -> None:
        while sequence.queue and sequence.running is None:
            deadline = sequence.queue[0].deadline
            request = self._scheduler.begin(sequence)
            if request is None:
                return
            try:
                answer = self._infer(request, deadline)
            except Exception as error:
                self._scheduler.finish(sequence, error)
                continue
            if isinstance(answer, InferResponse):
                self._scheduler.finish(sequence, answer)
                continue
            task = asyncio.get_running_loop().create_task(self._answered(sequence, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answered(self, sequence: LiveSequence, answer: Awaitable[InferResponse]) -> None:
        outcome: Outcome
        try:
            outcome = await answer
        except Exception as error:
            outcome = error
        self._scheduler.finish(sequence, outcome)
        self.place(sequence)

    def leave(self, number: int) -> None:
        """Nothing to do."""


class DirectSlots:
    """The slots of the strategy ``direct``, each a row of the batch."""

    def __init__(
        self,
        scheduler: SequenceScheduler,
        bound: BoundInstance,
        settings: SequenceSettings,
        tensors: SequenceTensors,
        runner: BatchRunner,
        joiner: Joiner,
    ) -> None:
        self._scheduler, self.bound, self._settings = scheduler, bound, settings
        self._tensors, self._runner, self._joiner = tensors, runner, joiner
        self._sequences: dict[int, LiveSequence] = {}
        self._running: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def place(self, sequence: LiveSequence) -> None:
        if sequence.slot is not None:
            self._sequences[sequence.slot[0]] = sequence
            self._dispatch()

    def leave(self, number: int) -> None:
        self._sequences.pop(number, None)

    def _dispatch(self) -> None:
        """Start a batch, unless one runs or waits for more requests."""
        if self._running is not None:
            return
        ready = [number for number, each in sorted(self._sequences.items()) if each.queue]
        if not ready or self._waits(ready):
            return
        shapes = self._shapes(self._sequences[ready[0]])
        rows: dict[int, tuple[LiveSequence, QueuedRequest]] = {}
        for number in ready:
            sequence = self._sequences[number]
            if self._shapes(sequence) != shapes:
                continue  # in a later batch
            deadline = sequence.queue[0].deadline
            request = self._scheduler.begin(sequence)
            if request is not None:
                rows[number] = sequence, _member(request, deadline)
        if rows:
            self._running = asyncio.get_running_loop().create_task(self._run(rows))

    def _waits(self, ready: list[int]) -> bool:
        """Whether the requests wait for others; then set the timer."""
        if len(ready) >= self._settings.ready_slots or not self._settings.delay_seconds:
            return False
        first = min(self._sequences[number].queue[0].queued_ns for number in ready) / 1e9
        left_seconds = first + self._settings.delay_seconds - time.monotonic()
        if left_seconds <= 0:
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(left_seconds, self._dispatch)
        return True

    def _shapes(self, sequence: LiveSequence) -> object:
        """A key: requests with equal ones can be rows of a batch."""
        queued = sequence.queue[0]
        states = self._tensors.first if queued.start else sequence.states
        return self._joiner.bucket(queued.request), [each.shape for each in states.values()]

    async def _run(self, rows: dict[int, tuple[LiveSequence, QueuedRequest]]) -> None:
        _, first = next(iter(rows.values()))
        members = []
        for number in range(max(rows) + 1):
            if number in rows:
                members.append(rows[number][1])
            else:
                empty = self._tensors.empty(first.request)
                members.append(_member(empty, NO_DEADLINE))
        outcomes = await self._runner.run(members)
        self._running = None
        for number, (sequence, _) in rows.items():
            self._scheduler.finish(sequence, outcomes[number])
        self._dispatch()


def _member(request: InferRequest, deadline: Deadline) -> QueuedRequest:
    """A row of the batch. Its run goes on without its client, so that the sequence can go on."""
    reply: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
    now_ns = time.monotonic_ns()
    return QueuedRequest(request, deadline, reply, None, 1, now_ns, now_ns / 1e9)
