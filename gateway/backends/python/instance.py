"""An instance of a Python model: its worker, the batches that this runs, and its restarts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import structlog

from modelport.gateway.backends.backend_host import Host
from modelport.gateway.backends.python import codec, limits
from modelport.gateway.backends.python.calls import WorkerCalls
from modelport.gateway.backends.python.environment import WorkerEnvironment
from modelport.gateway.backends.python.metrics import ModelMetrics
from modelport.gateway.backends.python.python_process import PythonProcess
from modelport.gateway.backends.python.requests import PendingRequest, RunningBatch
from modelport.gateway.backends.python_worker import frames
from modelport.gateway.backends.python_worker.channel import WINDOW
from modelport.gateway.backends.python_worker.frames import Frame, FrameError
from modelport.gateway.errors import Code, Internal, InvalidArgument, ModelportError, Unavailable
from modelport.gateway.settings import PythonModels
from modelport.gateway.types import InferResponse

log = structlog.get_logger("modelport.python")

#: An execution as short as this gets the next ones before it ends, so that it never waits for them:
#: as many as take this time together.
SHORT_SECONDS, AHEAD_SECONDS = 0.002, 0.016
#: After one as short as this, the response is there before the loop could do anything else.
BRIEF_SECONDS = 0.0002
#: Those that such a worker has at a time: behind a slow one they cannot go to another instance. Of
#: large ones, those that it has not read.
AHEAD, AHEAD_OF_MANY, LARGE_AHEAD = 64, 8, 2
#: Those that the worker of a coroutine that streams has at a time.
CONCURRENT = 64
#: Responses to requests that have ended, since the last execution.
MAX_STRAYS = 10_000
#: A worker that lives as long as this restarts at once.
STABLE_SECONDS = 5.0
#: The longest check of a model's own.
CHECK_SECONDS = 5.0
#: The time to finalize and end.
STOP_SECONDS = 10.0


class InstanceSettings(NamedTuple):
    """Everything that the instances of one model have in common.

    ``start`` is their first frame without the instance's name and the configuration.
    """

    host: Host
    environment: WorkerEnvironment
    limits: PythonModels
    start: dict[str, str]
    metrics: ModelMetrics


class InstanceOwner(Protocol):
    """The model of the instances."""

    decoder: codec.ResponseDecoder
    #: The arguments of ``initialize``, but those of one instance.
    arguments: dict[str, str]

    @property
    def ahead(self) -> int:
        """The number of short executions that an instance has at a time."""

    def freed(self) -> None:
        """An instance may get another batch."""

    def again(self, instance: Instance, pending: PendingRequest) -> None:
        """The model wants to get the request again."""

    def lost(self, instance: Instance, waiting: Sequence[PendingRequest]) -> None:
        """The worker has ended; requests ``waiting`` in it have not begun."""

    def may_restart(self) -> str:
        """The reason why no worker may start; empty: it may."""


class Instance:
    """One instance. Belongs to the event loop; a ``WorkerOwner``."""

    def __init__(
        self,
        owner: InstanceOwner,
        name: str,
        settings: InstanceSettings,
        place: tuple[str, str, bytes],
    ) -> None:
        self._owner, self.name, self._settings = owner, name, settings
        self.place = place
        self.kind, self.device, _ = place
        self._loop = settings.host.loop
        self._worker: PythonProcess | None = None
        self._calls: WorkerCalls | None = None
        #: By the number of their first request, in order.
        self._batches: dict[int, RunningBatch] = {}
        #: Sent requests without their last response.
        self._outstanding: dict[int, PendingRequest] = {}
        self._last = 0
        #: The number of workers that have ended.
        self.generation = 0
        self._strays, self._mean_seconds = 0, 0.0
        #: Whether the model calls others, which may lead to itself: such a request, if sent ahead,
        #: would wait for the one before it, and that one for its answer.
        self._makes_calls = False
        self.ready = self.closed = False
        #: Set once nothing runs here, after ``leave``.
        self._done: asyncio.Event | None = None
        self.concurrent = False
        #: Why there is no worker; empty: there is one, or it starts.
        self.problem = ""
        self._crashes = self._failed_starts = 0
        self._ready_at = 0.0
        self._phase: asyncio.Future[Frame] | None = None
        #: The answer of the model's own check that is asked for.
        self._check: asyncio.Future[bool] | None = None
        self._checks_itself = False
        self._restart: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None
        self._ended: asyncio.Event = asyncio.Event()
        self._ended.set()

    # -- start and end ----------------------------------------------------------------------------

    async def launch(self, config: str) -> object:
        """Start a worker up to its configuration: what ``auto_complete_config`` has made of it.

        Args:
            config: empty: it is complete.

        Raises:
            InvalidArgument: the model does not load.
        """
        settings = self._settings
        self._worker = PythonProcess(
            self._loop, settings.environment, self.name, self, settings.limits.most_bytes
        )  # fmt: skip
        self._ended.clear()
        self._calls = WorkerCalls(
            settings.host, self._worker, settings.metrics, self._outstanding.get
        )
        start = {**settings.start, "instance": self.name, "config": config}
        frame = await self._answered(frames.pack(frames.START, 0, 0, json.dumps(start).encode()))
        completed: object = codec.parsed(frame.meta) if frame.meta else None
        return completed

    async def initialize(self) -> None:
        """Initialize the model in the worker; raises ``InvalidArgument`` if that fails."""
        arguments = {
            **self._owner.arguments,
            "model_instance_name": self.name,
            "model_instance_kind": self.kind,
            "model_instance_device_id": self.device,
        }
        meta = json.dumps(arguments).encode()
        frame = await self._answered(frames.pack(frames.INITIALIZE, 0, 0, meta))
        self.concurrent = bool(frame.value & frames.CONCURRENT)
        self._checks_itself = bool(frame.value & frames.CHECKS)
        self.ready, self.problem = True, ""
        self._ready_at = time.monotonic()
        self._failed_starts = 0

    async def _answered(self, frame: frames.OutgoingFrame) -> Frame:
        assert self._worker is not None
        self._phase = self._loop.create_future()
        self._worker.send(frame)
        answer = await self._phase
        if answer.kind == frames.FAILED:
            raise InvalidArgument(f"Internal: {codec.parsed(answer.meta)}")
        return answer

    def gone(self, reason: str) -> None:
        was_ready, self.ready, self._worker = self.ready, False, None
        self.generation += 1
        if self._calls is not None:
            self._calls.close()
        if self._phase is not None and not self._phase.done():
            self._phase.set_exception(InvalidArgument(f"Internal: {self._unhealthy(reason)}"))
        if self._check is not None and not self._check.done():
            self._check.set_result(False)
        self._ended.set()
        if not was_ready:
            return
        if not self.closed:
            log.error("a worker has ended", instance=self.name, reason=reason)
        batches, outstanding = list(self._batches.values()), dict(self._outstanding)
        self._batches.clear()
        self._outstanding.clear()
        # Without concurrency only the first batch has begun.
        begun = batches if self.concurrent else batches[:1]
        waiting = [m for batch in batches if batch not in begun for m in batch.members]
        for batch in begun:
            for member in batch.members:
                member.executed()
        error = self._unhealthy(reason)
        for pending in waiting:
            outstanding.pop(pending.number, None)
        for pending in outstanding.values():
            pending.settle(Unavailable(f"{error}; it is restarted"), True)
        stable = time.monotonic() - self._ready_at > STABLE_SECONDS
        self._crashes = 0 if stable else self._crashes + 1
        self._restart_in(limits.crash_pause(self._crashes))
        self._owner.lost(self, waiting)
        self._leave_if_done()

    def _unhealthy(self, reason: str) -> str:
        """The end of the process in Triton's words."""
        return f"Stub process '{self.name}' is not healthy. {reason}"

    def _restart_in(self, seconds: float) -> None:
        if not self.closed:
            self._restart = self._loop.call_later(seconds, self._start_again)

    def _start_again(self) -> None:
        self._restart = None
        self._starting = self._loop.create_task(self._started_again())

    async def _started_again(self) -> None:
        refused = self._owner.may_restart()
        try:
            if refused:
                raise Internal(refused)
            async with asyncio.timeout(self._settings.limits.load_seconds):
                await self.launch("")
                await self.initialize()
        except Exception as error:
            reason = str(error) if isinstance(error, ModelportError) else "it cannot be started"
            log.error("a worker does not start", instance=self.name, reason=str(error))
            reason = reason.removeprefix("Internal: ").removeprefix(self._unhealthy(""))
            self.problem = self._unhealthy(reason)
            self._owner.lost(self, ())
            self.kill("it does not start")
            await self._ended.wait()
            self._failed_starts += 1
            self._restart_in(limits.start_pause(self._failed_starts))
            return
        if self.closed:
            self.kill("the model is unloaded")
            return
        log.info("a worker has been restarted", instance=self.name)
        self._owner.freed()

    def kill(self, reason: str) -> None:
        """End the worker, as after a crash."""
        if self._worker is not None:
            self._worker.kill(reason)

    async def leave(self) -> None:
        """Wait until nothing runs here; the owner sends nothing more."""
        self._done = asyncio.Event()
        self._leave_if_done()
        await self._done.wait()

    def _leave_if_done(self) -> None:
        if self._done is not None and not self.busy:
            self._done.set()

    async def close(self) -> None:
        """Let the model finalize, and end the worker for good."""
        self.closed = True
        if self._restart is not None:
            self._restart.cancel()
        if self._worker is None:
            return
        if not self.ready:
            self._worker.kill("the model is unloaded")
        self._worker.send(frames.pack(frames.STOP, 0))
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            self.kill("it does not end")
            await self._ended.wait()

    async def check(self) -> bool:
        """Ask the model's ``is_ready``; callers at the same time share an answer.

        A model that computes is ready; it could not answer before its end.
        """
        if not self._checks_itself or not self.idle:
            return True
        if self._check is None or self._check.done():
            assert self._worker is not None
            self._check = self._loop.create_future()
            self._worker.send(frames.pack(frames.CHECK, 0))
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                return await asyncio.shield(self._check)
        except TimeoutError:
            return False

    # -- batches ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of batches that it has."""
        return len(self._batches)

    @property
    def idle(self) -> bool:
        """Whether it runs nothing."""
        return self.ready and not self._batches

    @property
    def accepts(self) -> bool:
        """Whether it takes another batch now."""
        worker = self._worker
        if not self.ready or worker is None:
            return False
        running, mean = len(self._batches), self._mean_seconds
        if self.concurrent:
            return running < CONCURRENT
        if not running:
            return True
        short = 0 < mean < SHORT_SECONDS and running * mean < AHEAD_SECONDS
        if not short or running >= self._owner.ahead or self._makes_calls:
            return False
        return worker.regions.unread < LARGE_AHEAD

    @property
    def brief(self) -> bool:
        """Whether it is idle, and its last executions were so short that one can wait for them."""
        if self._batches or not 0 < self._mean_seconds < BRIEF_SECONDS:
            return False
        return self.ready and not self._makes_calls and not self.concurrent

    def receive_soon(self) -> None:
        """Wait a moment for the worker's next frame."""
        if self._worker is not None:
            self._worker.receive_soon()

    def holds(self, pending: PendingRequest) -> bool:
        """Whether the execution of ``pending`` keeps the instance from others."""
        batches = self._batches.values()
        return not self.concurrent and any(pending in batch.members for batch in batches)

    def run(self, members: list[PendingRequest]) -> None:
        """Send a batch to the worker."""
        assert self._worker is not None
        first, now = self._last + 1, time.monotonic()
        now_ns = time.perf_counter_ns()
        try:
            requests = [member.request for member in members]
            frame = codec.request_frame(first, requests, self._worker.regions)
        except ModelportError as error:
            for member in members:
                member.settle(error, True)
            return
        begins = self.concurrent or not self._batches
        self._last += len(members)
        self._batches[first] = RunningBatch(members, now)
        for number, member in enumerate(members, first):
            member.number, member.instance = number, self
            member.sent_at = now
            member.request.timing.queue_ns += now_ns - member.queued_ns
            member.request.timing.begun = begins
            if member.request.span is not None:
                member.request.span.child("queue", member.queued_ns, now_ns)
            self._outstanding[number] = member
        # One that computes does not wait for the frame.
        self._worker.send(frame, soon=len(self._batches) > 1)

    def cancel(self, pending: PendingRequest) -> None:
        """Tell the worker that nobody waits for ``pending``."""
        if self._outstanding.get(pending.number) is pending and self._worker is not None:
            pending.abandoned_at = time.monotonic()
            self._worker.send(frames.pack(frames.CANCEL, pending.number))

    def credit(self, pending: PendingRequest, count: int) -> None:
        """Let a stream send ``count`` more responses."""
        if pending.number in self._outstanding and self._worker is not None:
            self._worker.send(frames.pack(frames.CREDIT, pending.number, count))

    # -- frames -----------------------------------------------------------------------------------

    def received(self, frame: Frame) -> None:
        kind = frame.kind
        if kind == frames.RESULT:
            self._result(frame)
        elif kind == frames.RESPONSE:
            self._response(frame)
        elif kind in (frames.CALL, frames.CALL_NEXT, frames.CALL_END, frames.CONTROL):
            assert self._calls is not None
            self._makes_calls |= kind == frames.CALL
            self._calls.received(frame)
        elif kind == frames.METRICS:
            self._settings.metrics.update(codec.parsed(frame.meta))
        elif kind == frames.CHECKED:
            if self._check is not None and not self._check.done():
                self._check.set_result(bool(frame.value))
        elif self._phase is None or self._phase.done():
            raise FrameError("it sends a frame that nobody waits for")
        else:
            self._phase.set_result(frame)

    def _result(self, frame: Frame) -> None:
        batch = self._batches.pop(frame.number, None)
        rows = codec.described_batch(frame.meta)
        if batch is None or len(rows) != len(batch.members):
            raise FrameError("a result belongs to no batch")
        self._strays, now = 0, time.monotonic()
        seconds = min(frame.value / 1e9, now - batch.sent_at)
        self._mean_seconds += 0.2 * (seconds - self._mean_seconds)
        self._crashes = 0
        if self._batches and not self.concurrent:
            following = next(iter(self._batches.values()))
            following.started_at = now
            for member in following.members:
                member.request.timing.begun = True
        offset, nanoseconds = 0, int(seconds * 1e9)
        again: list[PendingRequest] = []
        for member, row in zip(batch.members, rows, strict=True):
            if row is None:
                member.executed()
                continue  # its sender answers it
            member.request.timing.compute_infer_ns += nanoseconds
            if row is codec.RESCHEDULED:
                if self._outstanding.pop(member.number, None) is not None:
                    again.append(member)
                continue
            outcome, offset = self._owner.decoder.response(
                row, frame.content, offset, member.request
            )
            if self._outstanding.pop(member.number, None) is not None:
                member.settle(outcome, True)
            elif isinstance(outcome, ModelportError) and outcome.code is not Code.CANCELLED:
                log.error(
                    "a model has failed after its last response",
                    instance=self.name, error=str(outcome),
                )  # fmt: skip
        for member in again:
            self._owner.again(self, member)
        self._owner.freed()
        self._leave_if_done()

    def _response(self, frame: Frame) -> None:
        pending = self._outstanding.get(frame.number)
        if pending is None:
            self._strays += 1  # a request that has ended by an error, or by its limit
            if frame.number > self._last or self._strays > MAX_STRAYS:
                raise FrameError("a response belongs to no request")
            return
        final = bool(frame.value & frames.FINAL)
        outcome: InferResponse | ModelportError | None = None
        row = codec.described(codec.parsed(frame.meta)) if frame.meta else None
        if row is not None:
            outcome, _ = self._owner.decoder.response(row, frame.content, 0, pending.request)
        stream = pending.stream
        if stream is None and outcome is not None:
            seconds = time.monotonic() - pending.sent_at
            pending.request.timing.compute_infer_ns += int(seconds * 1e9)
            final = True
        elif stream is None and final:
            outcome = Internal(f"Stub process '{self.name}' has sent no response to a request")
        elif stream is not None and len(stream) > 2 * WINDOW:
            raise FrameError("it sends more responses than it may")
        if final or isinstance(outcome, ModelportError):
            del self._outstanding[frame.number]
        pending.settle(outcome, final)
        self._leave_if_done()

    # -- limits -----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._outstanding or self._batches)

    def watch(self) -> None:
        """End a worker that is stopped, too large, or stuck."""
        if self._worker is None:
            return
        allowed, now = self._settings.limits, time.monotonic()
        reason = limits.process_violation(*self._worker.state(), allowed.max_memory_bytes)
        for batch in self._batches.values():
            reason = reason or limits.batch_violation(batch, now, allowed.max_seconds)
            if not self.concurrent:
                break
        if reason:
            self.kill(reason)
        elif allowed.max_seconds is not None and not self._batches:
            for pending in list(self._outstanding.values()):
                if now - pending.sent_at > allowed.max_seconds:
                    del self._outstanding[pending.number]
                    pending.settle(limits.unanswered(allowed.max_seconds), True)
