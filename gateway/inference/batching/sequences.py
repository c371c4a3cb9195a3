"""The sequence scheduler: requests of a sequence run one at a time, in order, on one instance.

A sequence has a slot of an instance from its START to its END; while all slots are taken, further
sequences wait in the backlog. ``slots`` runs the requests. Only the event loop uses it.
"""

from __future__ import annotations

import asyncio
import copy
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from modelport.gateway.backends.capabilities import BoundInstance, Outcome
from modelport.gateway.errors import Cancelled, InvalidArgument, QueueFull, TimedOut, Unavailable
from modelport.gateway.inference.batching.sequence_batching import SequenceSettings
from modelport.gateway.inference.batching.sequence_tensors import SequenceTensors, States
from modelport.gateway.repository.config import DEFAULT_MAX_QUEUE_SIZE
from modelport.gateway.runtime.thread_reply import settle
from modelport.gateway.types import Answer, Deadline, InferRequest, InferResponse, Parameter

log = structlog.get_logger("modelport.inference")

#: Idle sequences are looked for at most this often in the time that makes one idle.
LOOKS = 16


@dataclass(slots=True, eq=False)
class SequenceRequest:
    """A request of a sequence from its arrival to its response."""

    request: InferRequest
    deadline: Deadline
    #: The response; of a decoupled model, the request as the model takes it, when its turn comes.
    reply: asyncio.Future[Any]
    start: bool
    end: bool
    decoupled: bool
    queued_ns: int


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence whose requests have not all been answered, or that more may come to.

    Attributes:
        running: the request that the model has.
        slot: number and instance; None: it is in the backlog.
        used_at: when its last request came or ended.
        expires_at: in the backlog, the earliest timeout of its requests.
        ended: it takes no more requests.
        generation: that of its instance at its START.
    """

    caller: str
    id: Parameter
    states: States
    queue: deque[SequenceRequest] = field(default_factory=deque)
    running: SequenceRequest | None = None
    slot: tuple[int, int] | None = None
    used_at: float = 0.0
    expires_at: float = math.inf
    ended: bool = False
    generation: int = 0


class SlotOwner(Protocol):
    """Runs the requests of the slots of an instance."""

    bound: BoundInstance

    def place(self, sequence: LiveSequence) -> None:
        """Run the requests of a sequence that has a slot here."""

    def leave(self, number: int) -> None:
        """Slot ``number`` is empty."""


class SequenceScheduler:
    """An ``Infer`` and, of a decoupled model, an ``InferStream``."""

    def __init__(self, model: str, settings: SequenceSettings, tensors: SequenceTensors) -> None:
        self._model, self._settings, self._tensors = model, settings, tensors
        #: One for each instance, by its number; those of removed ones go with their last sequence.
        self.owners: dict[int, SlotOwner] = {}
        #: Sequences that take requests, by caller and id: no caller continues another's.
        self._open: dict[tuple[str, Parameter], LiveSequence] = {}
        self._backlog: deque[LiveSequence] = deque()
        #: Slots that have been used. Low numbers first, so that batches of ``direct`` are small.
        self._free: list[tuple[int, int]] = []
        #: The first slot of each instance that no sequence has had.
        self._unused: list[tuple[int, int]] = []
        #: Owners that get no further sequences.
        self._leaving: set[int] = set()
        self._numbers = itertools.count()
        #: Of sequences of one request, whose clients give none.
        self._ids = itertools.count(1)
        self._waiting = 0
        #: Sequences with a slot.
        self._placed: set[LiveSequence] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def adopt(self, owners: Sequence[SlotOwner], removed: Collection[BoundInstance] = ()) -> None:
        """Add ``owners``; those of ``removed`` instances keep their sequences to the end."""
        gone = {index for index, owner in self.owners.items() if owner.bound in removed}
        numbers = [next(self._numbers) for _ in owners]
        self._leaving |= gone
        self.owners.update(zip(numbers, owners, strict=True))
        self._free = [slot for slot in self._free if slot[1] not in gone]
        staying = (slot for slot in self._unused if slot[1] not in gone)
        self._unused = [*staying, *((0, number) for number in numbers)]
        heapq.heapify(self._free)
        heapq.heapify(self._unused)
        while self._backlog and (slot := self._next_slot()) is not None:
            self._take(slot, self._backlog.popleft())
        for index in gone:
            self._retire_if_empty(index)

    def _next_slot(self) -> tuple[int, int] | None:
        if self._free:
            return heapq.heappop(self._free)
        if not self._unused:
            return None
        number, instance = self._unused[0]
        if number + 1 < self._settings.slots:
            return heapq.heapreplace(self._unused, (number + 1, instance))
        return heapq.heappop(self._unused)

    def _retire_if_empty(self, index: int) -> None:
        if not any(sequence.slot and sequence.slot[1] == index for sequence in self._placed):
            self._leaving.remove(index)
            retire = self.owners.pop(index).bound.retire
            if retire is not None:
                retire()

    # -- requests ---------------------------------------------------------------------------------

    def __call__(self, request: InferRequest, deadline: Deadline) -> Answer:
        queued, sequence = self._enter(request, deadline, decoupled=False)
        if queued.reply.done():
            response: InferResponse = queued.reply.result()
            return response
        return self._wait(queued, sequence)

    async def _wait(self, queued: SequenceRequest, sequence: LiveSequence) -> Any:
        try:
            return await queued.reply
        except asyncio.CancelledError:
            if queued.reply.cancelled():
                self._withdraw(queued, sequence)
            raise

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses when it is the request's turn; the next one begins afterwards."""
        queued, sequence = self._enter(request, deadline, decoupled=True)
        outcome: BaseException | None = None
        try:
            prepared = await self._wait(queued, sequence)
            assert sequence.slot is not None
            bound = self.owners[sequence.slot[1]].bound
            async with aclosing(bound.stream(prepared, deadline)) as responses:
                async for response in responses:
                    response, sequence.states = self._tensors.response(
                        response, request, sequence.states
                    )
                    yield response
        except Exception as error:
            outcome = error
            raise
        finally:
            if sequence.running is queued:
                self.finish(sequence, outcome)
                if sequence.slot is not None:
                    self.owners[sequence.slot[1]].place(sequence)

    def _enter(
        self, request: InferRequest, deadline: Deadline, decoupled: bool
    ) -> tuple[SequenceRequest, LiveSequence]:
        """Queue a request.

        Raises:
            InvalidArgument: it belongs to no sequence.
            Unavailable: it is too late, or too many wait.
        """
        if self._settings.iterative:
            id = request.parameters.get("sequence_id") or next(self._ids)
            request.parameters = {**request.parameters, "sequence_id": id, "sequence_start": True}
        parameters = request.parameters
        start, end = bool(parameters.get("sequence_start")), bool(parameters.get("sequence_end"))
        sequence = self._sequence(request, start)
        if deadline.expired or self._waiting >= DEFAULT_MAX_QUEUE_SIZE:
            refusal = TimedOut() if deadline.expired else QueueFull()
            if sequence is not None:
                self._abort_after(sequence, refusal)
            raise refusal
        loop, now_ns = asyncio.get_running_loop(), time.monotonic_ns()
        queued = SequenceRequest(
            request, deadline, loop.create_future(), start, end, decoupled, now_ns
        )
        if sequence is None:
            key = request.caller, parameters["sequence_id"]
            sequence = self._open[key] = LiveSequence(*key, self._tensors.first)
            sequence.slot = self._next_slot()
            if sequence.slot is None:
                self._backlog.append(sequence)
            else:
                self._placed.add(sequence)
        sequence.queue.append(queued)
        self._waiting += 1
        now = sequence.used_at = now_ns / 1e9
        if end or self._settings.iterative:
            self._close(sequence)
        self._wake_at(now + self._settings.idle_seconds)
        if sequence.slot is not None:
            self.owners[sequence.slot[1]].place(sequence)
        elif timeout := int(parameters.get("timeout", 0)):
            sequence.expires_at = min(sequence.expires_at, now + timeout / 1e6)
            self._wake_at(sequence.expires_at)
        return queued, sequence

    def _sequence(self, request: InferRequest, start: bool) -> LiveSequence | None:
        """The sequence that the request continues; None: it starts one."""
        id, inputs = request.parameters.get("sequence_id", 0), request.inputs
        if inputs and self._settings.batched and inputs[0].data.shape[0] > 1:
            raise InvalidArgument(
                f"inference request to model '{self._model}' must specify batch-size 1 due to "
                "requirements of sequence batcher"
            )
        if not id:
            raise InvalidArgument(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty "
                "correlation ID"
            )
        self._tensors.check_id(id)
        sequence = self._open.get((request.caller, id))
        if sequence is None and not start:
            raise InvalidArgument(
                f"inference request for sequence {id} to model '{self._model}' must specify the "
                "START flag on the first request of the sequence"
            )
        if sequence is not None and start:
            log.warning(
                "a sequence starts before its END; the earlier one ends", model=self._model,
                sequence=id,
            )  # fmt: skip
        return sequence

    def _withdraw(self, queued: SequenceRequest, sequence: LiveSequence) -> None:
        """The client has gone. The sequence lacks the request, so that it ends, as in Triton."""
        if queued in sequence.queue:
            self._abort(
                sequence,
                Cancelled(f"sequence {sequence.id} has ended: a request of it was cancelled"),
            )

    # -- sequences --------------------------------------------------------------------------------

    def begin(self, sequence: LiveSequence) -> InferRequest | None:
        """Take the next request of a sequence that runs none; None: the sequence has ended."""
        assert sequence.slot is not None
        queued, generation = sequence.queue[0], self.owners[sequence.slot[1]].bound.generation()
        if queued.start:
            sequence.states, sequence.generation = self._tensors.first, generation
        elif sequence.generation != generation:
            self._abort(
                sequence,
                Unavailable(
                    f"model '{self._model}' has been restarted and has lost sequence "
                    f"{sequence.id}; start it again"
                ),
            )
            return None
        sequence.running = sequence.queue.popleft()
        self._waiting -= 1
        now_ns = time.monotonic_ns()
        queued.request.timing.queue_ns += now_ns - queued.queued_ns
        prepared = self._tensors.request(
            queued.request, sequence.id, sequence.states, queued.start, queued.end
        )
        if queued.decoupled:
            if queued.request.span is not None:
                queued.request.span.child("queue", queued.queued_ns, now_ns)
            settle(queued.reply, prepared)
        return prepared

    def finish(self, sequence: LiveSequence, outcome: Outcome | None) -> None:
        """End the running request; the owner of the slot runs the next one.

        Args:
            outcome: None: its stream has ended.
        """
        queued, sequence.running = sequence.running, None
        assert queued is not None
        sequence.used_at = time.monotonic()
        if isinstance(outcome, InferResponse):
            outcome, sequence.states = self._tensors.response(
                outcome, queued.request, sequence.states
            )
        if outcome is not None:
            settle(queued.reply, outcome)
        if isinstance(outcome, Unavailable):
            self._abort_after(sequence, outcome)
        elif sequence.ended and not sequence.queue:
            self._release(sequence)

    def _abort_after(self, sequence: LiveSequence, refusal: Unavailable) -> None:
        """End a sequence after a request that has not run: the next ones would be wrong."""
        self._abort(
            sequence, Unavailable(f"sequence {sequence.id} has ended: {refusal}; start it again")
        )

    def _abort(self, sequence: LiveSequence, error: Exception) -> None:
        """End a sequence: its requests that wait get ``error``."""
        self._waiting -= len(sequence.queue)
        for queued in sequence.queue:
            settle(queued.reply, copy.copy(error))
        sequence.queue.clear()
        self._close(sequence)
        if sequence.slot is None:
            self._backlog.remove(sequence)
        elif sequence.running is None:
            self._release(sequence)

    def _close(self, sequence: LiveSequence) -> None:
        """Take no more requests of it; its id may start another one."""
        sequence.ended = True
        key = sequence.caller, sequence.id
        if self._open.get(key) is sequence:
            del self._open[key]

    def _release(self, sequence: LiveSequence) -> None:
        """Give the slot of a sequence to the first one of the backlog."""
        slot, sequence.slot = sequence.slot, None
        if slot is None:
            return
        self._placed.discard(sequence)
        owner = self.owners[slot[1]]
        owner.leave(slot[0])
        if slot[1] in self._leaving:
            self._retire_if_empty(slot[1])
        elif self._backlog:
            self._take(slot, self._backlog.popleft())
        else:
            heapq.heappush(self._free, slot)

    def _take(self, slot: tuple[int, int], sequence: LiveSequence) -> None:
        sequence.slot = slot
        self._placed.add(sequence)
        # Later, because a run of sequences of one request each would call itself.
        asyncio.get_running_loop().call_soon(self.owners[slot[1]].place, sequence)

    # -- timers -----------------------------------------------------------------------------------

    def _wake_at(self, at: float) -> None:
        """Call ``_on_time`` no later than ``at``."""
        if at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        after_seconds = max(0.0, at - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(after_seconds, self._on_time)

    def _on_time(self) -> None:
        """End idle sequences, and those that have waited too long for a slot."""
        self._timer, self._timer_at = None, math.inf
        now, idle_seconds = time.monotonic(), self._settings.idle_seconds
        for sequence in [each for each in self._backlog if each.expires_at <= now]:
            self._abort(
                sequence, Unavailable("timeout of the corresponding sequence has been expired")
            )
        idle_at = math.inf
        for sequence in list(self._placed):
            if sequence.running is not None or sequence.queue:
                idle_at = min(idle_at, now + idle_seconds)
            elif sequence.used_at + idle_seconds > now:
                idle_at = min(idle_at, sequence.used_at + idle_seconds)
            else:
                self._abort(sequence, Cancelled())  # it has no requests
        if idle_at != math.inf:
            self._wake_at(max(idle_at, now + idle_seconds / LOOKS))
        for sequence in self._backlog:
            self._wake_at(sequence.expires_at)
