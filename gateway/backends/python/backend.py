"""Triton's Python models: ``model.py`` with a class ``TritonPythonModel``, unmodified.

Each instance is a process with an interpreter of its own (``python_worker``), so what a model does
wrong stays there. Requests wait here for an instance; a short execution gets the next one ahead.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from google.protobuf import json_format

from modelport.gateway.backend_registry import PYTHON
from modelport.gateway.backends.backend_host import Host
from modelport.gateway.backends.base import Artifact, Execution
from modelport.gateway.backends.capabilities import BoundInstance
from modelport.gateway.backends.python import environment, python_based
from modelport.gateway.backends.python.calls import CALLERS
from modelport.gateway.backends.python.codec import ResponseDecoder
from modelport.gateway.backends.python.environment import WorkerEnvironment
from modelport.gateway.backends.python.instance import (
    AHEAD,
    AHEAD_OF_MANY,
    Instance,
    InstanceSettings,
)
from modelport.gateway.backends.python.metrics import ModelMetrics
from modelport.gateway.backends.python.requests import (
    PendingRequest,
    ResponseStream,
)
from modelport.gateway.backends.python_worker.channel import WINDOW
from modelport.gateway.errors import (
    Internal,
    InvalidArgument,
    ModelportError,
    QueueFull,
    TimedOut,
    Unavailable,
    Unsupported,
)
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import DEFAULT_MAX_QUEUE_SIZE, ModelConfig
from modelport.gateway.settings import PythonModels
from modelport.gateway.types import Answer, Deadline, InferRequest, InferResponse
from modelport.gateway.wire.proto import model_config_pb2 as pb

log = structlog.get_logger("modelport.python")

#: Between two looks at busy workers, and at idle ones.
WATCH_SECONDS, IDLE_WATCH_SECONDS = 0.25, 1.0
#: After as many requests in a row that have found no other one, the loop waits for the response.
ALONE = 8
#: What ``auto_complete_config`` may complete.
_COMPLETED = (
    "max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy",
)  # fmt: skip
_SLOW_LOAD = "the load exceeds the limit of --model-load-timeout-secs"
#: Name, and what an instance needs to be kept: kind, device, resources of the rate limiter.
InstanceName = tuple[str, tuple[str, str, bytes]]
_KINDS = {pb.ModelInstanceGroup.KIND_GPU: "GPU", pb.ModelInstanceGroup.KIND_MODEL: "MODEL"}


def load(artifact: Artifact) -> PythonBackend:
    """Start the instances of a model, complete its configuration, and initialize them.

    Raises:
        Unsupported: Python models are not allowed.
        InvalidArgument: the model does not load; the message has its exception.
        Internal: the loader runs outside of a gateway.
    """
    allowed, host = artifact.python, artifact.host
    if allowed is None:
        raise Unsupported(
            f"model '{artifact.model_name}' is Python code, which can do anything; give "
            "--allow-python if you trust the repository, or sign the version and give "
            "--require-signature"
        )
    if host is None:
        raise Internal("a Python model can only be loaded by a gateway")
    backend = artifact.config.backend
    based = python_based.folder_of(backend, allowed.backends) if backend != PYTHON.backend else None
    name = artifact.config.default_model_filename or python_based.FILE
    if not name.endswith(".py"):
        raise InvalidArgument(f"'default_model_filename' must end in .py, not '{name}'")
    if based is not None and name != python_based.FILE:
        raise InvalidArgument(
            f"the code of backend '{backend}' is its own {python_based.FILE}; remove "
            f"'default_model_filename: \"{name}\"'"
        )
    if based is None and not (artifact.path / name).is_file():
        raise InvalidArgument(f"'{name}' is missing from version {artifact.version}")
    groups = artifact.config.instance_group
    instances = configuration.instance_count(artifact.config)
    prepared = environment.prepare(artifact, instances, allowed)
    served = PythonBackend(artifact, host, allowed, prepared, based or prepared.folder)
    try:
        starting = asyncio.run_coroutine_threadsafe(served.start(groups), host.loop)
        try:
            starting.result(allowed.load_seconds)
        except TimeoutError:
            starting.cancel()
            raise Internal(_SLOW_LOAD) from None
    except BaseException:
        served.unload()
        raise
    return served


class PythonBackend:
    """An ``Infer`` over the instances of one model. Belongs to the event loop."""

    def __init__(
        self,
        artifact: Artifact,
        host: Host,
        allowed: PythonModels,
        prepared: WorkerEnvironment,
        code: Path,
    ) -> None:
        self.config: ModelConfig = artifact.config
        self._name, self._version = artifact.model_name, artifact.version
        self._host, self._prepared = host, prepared
        self._file: str = artifact.config.default_model_filename or python_based.FILE
        #: The folder of that file: the version's, or that of a Python-based backend.
        self._code_folder = code
        #: The version's folder; empty for a file outside of a repository, with any neighbours.
        self._folder = prepared.folder.name if prepared.folder.name == str(self._version) else ""
        self._code = self._code_files()
        self._metrics = ModelMetrics()
        self._completes = allowed.completes
        start = {
            "model": self._name, "folder": str(prepared.folder), "file": self._file,
            "version": self._folder, "code": str(code),
        }  # fmt: skip
        self._settings = InstanceSettings(host, prepared, allowed, start, self._metrics)
        self._instances: list[Instance] = []
        #: Removed ones that have requests left, or sequences.
        self._leaving: list[Instance] = []
        self._bounds: dict[Instance, BoundInstance] = {}
        #: Batches that wait for an instance, and how many requests of them somebody waits for.
        self._queue: deque[list[PendingRequest]] = deque()
        self._queued = 0
        self._next = 0
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.arguments: dict[str, str] = {}
        self.decoder = ResponseDecoder(self._name, self._version, self.config)
        #: Requests in a row that have found no other one, and whether one was answered at once in
        #: this turn of the loop.
        self._alone, self._answered = 0, False
        self.execution = Execution(batches=False, queues=True, inline=self._answers_at_once)

    # -- start and end ----------------------------------------------------------------------------

    async def start(self, groups: Sequence[Any]) -> None:
        """Start all instances; the first one completes the configuration."""
        self._instances = self._made(instance_names(groups))
        first = self._instances[0]
        document = configuration.to_json(self.config)
        completed = await first.launch(json.dumps(document) if self._completes else "")
        self.config = completed_config(self.config, completed, self._name)
        self.decoder = ResponseDecoder(self._name, self._version, self.config)
        folder = self._prepared.folder
        self.arguments = model_arguments(self.config, self._name, self._version, folder)
        await asyncio.gather(first.initialize(), *map(_start, self._instances[1:]))
        self._watch()

    def _made(self, names: Sequence[InstanceName]) -> list[Instance]:
        return [Instance(self, name, self._settings, place) for name, place in names]

    @property
    def ahead(self) -> int:
        return AHEAD if len(self._instances) == 1 else AHEAD_OF_MANY

    async def scale(self, config: ModelConfig) -> Sequence[BoundInstance]:
        """Start and remove instances; those of a place that stay keep their names, as in Triton."""
        names, kept = [], []
        unused: dict[tuple[str, str, bytes], deque[Instance]] = {}
        for each in self._instances:
            unused.setdefault(each.place, deque()).append(each)
        for name, place in instance_names(config.instance_group):
            if alike := unused.get(place):
                kept.append(alike.popleft())
            else:
                names.append((name, place))
        folder, arguments = self._prepared.folder, self.arguments
        self.arguments = model_arguments(config, self._name, self._version, folder)
        new = self._made(names)
        try:
            async with asyncio.timeout(self._settings.limits.load_seconds):
                await asyncio.gather(*map(_start, new))
            if self._closed:
                raise Unavailable("the model is unloaded")
        except BaseException as error:
            self.arguments = arguments
            await asyncio.gather(*(each.close() for each in new))
            if isinstance(error, TimeoutError):
                raise Internal(_SLOW_LOAD) from None
            raise
        self.config = config
        removed = [each for alike in unused.values() for each in alike]
        bounds = [self._bound(each) for each in removed]
        self._leaving += removed
        self._instances = [*kept, *new]
        self._next = 0
        self.freed()
        return bounds

    def _retire(self, instance: Instance) -> asyncio.Task[None]:
        task = self._host.loop.create_task(self._ended(instance))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        return task

    async def _ended(self, instance: Instance) -> None:
        await instance.leave()
        await instance.close()
        self._leaving.remove(instance)
        self._bounds.pop(instance, None)

    def unload(self) -> None:
        """End the workers, from any thread."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            # All threads of the loop's executor may be here, so that closing must not need one.
            asyncio.run_coroutine_threadsafe(self._close(), self._host.loop).result()
            self._prepared.remove()
        else:
            self._closing = running.create_task(self._close_and_remove())

    async def _close_and_remove(self) -> None:
        await self._close()
        await asyncio.to_thread(self._prepared.remove)

    async def _close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._refuse(Unavailable("the model is unloaded"))
        everything = (*self._instances, *self._leaving)
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*(each.close() for each in everything))
        self._metrics.close()

    def _watch(self) -> None:
        everything = (*self._instances, *self._leaving)
        for instance in everything:
            instance.watch()
        busy = any(instance.busy for instance in everything)
        seconds = WATCH_SECONDS if busy else IDLE_WATCH_SECONDS
        if not self._closed:
            self._timer = self._host.loop.call_later(seconds, self._watch)

    @property
    def problem(self) -> str:
        """The reason why no instance answers now."""
        if any(instance.ready for instance in self._instances):
            return ""
        found = [each.problem for each in self._instances if each.problem]
        return found[0] if found else f"the workers of model '{self._name}' are being restarted"

    async def check_ready(self) -> None:
        for instance in self._instances:
            if instance.ready and not await instance.check():
                raise Unavailable(
                    f"Model '{instance.name}' is not ready (user-defined check failed)."
                )

    def _code_files(self) -> dict[str, tuple[int, int, int]]:
        folder = self._code_folder
        files = sorted(folder.rglob("*.py")) if self._folder else [folder / self._file]
        return {
            str(path): (found.st_size, found.st_mtime_ns, found.st_ino)
            for path in files
            for found in [path.stat()]
        }

    def may_restart(self) -> str:
        if self._code_files() != self._code:
            return f"the code of model '{self._name}' has changed; load the model again"
        return ""

    # -- requests ---------------------------------------------------------------------------------

    def __call__(self, request: InferRequest, deadline: Deadline) -> Answer:
        pending = self._pending(request, deadline)
        alone = self._is_alone()
        at_once = alone and self._alone >= ALONE
        self._alone = self._alone + 1 if alone else 0
        self._enter([pending])
        if at_once and pending.instance is not None:
            pending.instance.receive_soon()
            if pending.reply.done():
                self._answered = True
                self._host.loop.call_soon(self._turn)
                return pending.reply.result()
            self._alone = 0
        return pending

    def _answers_at_once(self, request: InferRequest) -> bool:
        """Whether the loop waits for the response: requests come one by one, and are brief.

        Of several requests at a time, one is better received while another one is computed. If it
        is not brief after all, a later one may overtake it.
        """
        ordered = self.config.dynamic_batching.preserve_ordering
        return self._alone >= ALONE and self._is_alone() and not ordered

    def _is_alone(self) -> bool:
        if self._answered:
            return False
        for instance in self._instances:  # noqa: SIM110 - a generator costs more
            if not instance.brief:
                return False
        return True

    def _turn(self) -> None:
        self._answered = False

    async def infer_together(
        self,
        requests: Sequence[InferRequest],
        deadlines: Sequence[Deadline],
        replies: Sequence[asyncio.Future[InferResponse]],
        instance: Instance | None = None,
    ) -> list[InferResponse | ModelportError]:
        """Run requests as one batch: the model gets each by itself, and may fail some."""
        batch = [self._pending(*each) for each in zip(requests, deadlines, strict=True)]
        for pending, reply in zip(batch, replies, strict=True):
            reply.add_done_callback(partial(self._withdrawn, pending))
        self._enter(batch, instance)
        outcomes: list[InferResponse | ModelportError] = []
        try:
            for pending in batch:
                try:
                    outcomes.append(await pending.reply)
                except ModelportError as error:
                    outcomes.append(error)
        except asyncio.CancelledError:
            for pending in batch:
                self._abandon(pending)
            raise
        return outcomes

    def _withdrawn(self, pending: PendingRequest, reply: asyncio.Future[InferResponse]) -> None:
        if reply.cancelled():
            self._abandon(pending)

    async def stream(
        self, request: InferRequest, deadline: Deadline, instance: Instance | None = None
    ) -> AsyncGenerator[InferResponse, None]:
        pending = self.open(request, deadline)
        self._enter([pending], instance)
        async with aclosing(self.responses(pending)) as responses:
            async for response in responses:
                yield response

    def open(self, request: InferRequest, deadline: Deadline) -> PendingRequest:
        pending = self._pending(request, deadline)
        pending.stream = ResponseStream()
        return pending

    async def execute_together(self, opened: Sequence[PendingRequest]) -> None:
        batch = [pending for pending in opened if not pending.abandoned_at]
        if not batch:
            return
        self._enter(batch)
        if not self._instances[0].concurrent:
            await asyncio.wait([pending.reply for pending in batch])

    async def responses(self, opened: PendingRequest) -> AsyncGenerator[InferResponse, None]:
        pending, stream = opened, opened.stream
        assert stream is not None
        taken = 0
        try:
            while (outcome := await stream.get()) is not None:
                if isinstance(outcome, ModelportError):
                    raise outcome
                yield outcome
                taken += 1
                if taken == WINDOW // 2 and pending.instance is not None:
                    pending.instance.credit(pending, taken)
                    taken = 0
        finally:
            self._abandon(pending)

    def _pending(self, request: InferRequest, deadline: Deadline) -> PendingRequest:
        if deadline.expired:
            raise TimedOut
        return PendingRequest(request, deadline, self._host.loop.create_future(), self._abandon)

    def bound_instances(self) -> list[BoundInstance]:
        return [self._bound(each) for each in self._instances]

    def _bound(self, instance: Instance) -> BoundInstance:
        if instance not in self._bounds:
            self._bounds[instance] = BoundInstance(
                partial(self._infer_at, instance),
                partial(self.stream, instance=instance),
                partial(self.infer_together, instance=instance),
                partial(getattr, instance, "generation"),
                partial(self._retire, instance),
            )
        return self._bounds[instance]

    def _infer_at(self, instance: Instance, request: InferRequest, deadline: Deadline) -> Answer:
        pending = self._pending(request, deadline)
        self._enter([pending], instance)
        return pending

    def _enter(self, batch: list[PendingRequest], bound: Instance | None = None) -> None:
        if bound is not None:
            if not bound.ready:
                raise Unavailable(bound.problem or f"instance '{bound.name}' is being restarted")
            for pending in batch:
                pending.bound = True
            bound.run(batch)
            return
        if not self._queue:
            instance = self._free()
            if instance is not None:
                instance.run(batch)
                return
        if self._closed:
            raise Unavailable("the model is unloaded")
        if all(instance.problem for instance in self._instances):
            raise Unavailable(self.problem)
        if self._queued >= DEFAULT_MAX_QUEUE_SIZE:
            raise QueueFull
        self._check_callers()
        self._queue.append(batch)
        self._count(batch)

    def _check_callers(self) -> None:
        """Refuse a request that waits for itself: its callers hold all instances."""
        callers = CALLERS.get()
        if callers and all(any(map(each.holds, callers)) for each in self._instances):
            raise Unavailable(
                f"model '{self._name}' calls itself, and each of its instances waits for such a "
                "call; raise 'count' of its 'instance_group'"
            )

    def _free(self) -> Instance | None:
        """The instance for the next batch: an idle one, by turns, or one that takes it ahead."""
        instances = self._instances
        if len(instances) == 1:
            only = instances[0]
            return only if only.accepts else None
        count = len(instances)
        for turn in range(self._next, self._next + count):
            if instances[turn % count].idle:
                self._next = (turn + 1) % count
                return instances[turn % count]
        able = [instance for instance in instances if instance.accepts]
        return min(able, key=len) if able else None

    def freed(self) -> None:
        while self._queue:
            free = self._free()
            if free is None:
                return
            batch = self._queue.popleft()
            for pending in batch:
                self._uncount(pending)
            wanted = [pending for pending in batch if _is_wanted(pending)]
            if wanted:
                free.run(wanted)

    def again(self, instance: Instance, pending: PendingRequest) -> None:
        """Run a request that the model has rescheduled, behind those that wait."""
        pending.instance = None
        if not self.config.sequence_batching.iterative_sequence:
            pending.settle(
                Internal(
                    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, which needs "
                    f"'sequence_batching {{ iterative_sequence: true }}' in the configuration of "
                    f"model '{self._name}'"
                ),
                True,
            )
        elif _is_wanted(pending):
            request = pending.request
            request.parameters = {**request.parameters, "sequence_start": False}
            pending.queued_ns = time.perf_counter_ns()
            try:
                self._enter([pending], instance if pending.bound else None)
            except ModelportError as error:
                pending.settle(error, True)

    def lost(self, instance: Instance, waiting: Sequence[PendingRequest]) -> None:
        for pending in reversed(waiting):
            pending.instance = None
            if pending.bound:
                pending.settle(Unavailable(f"instance '{instance.name}' is being restarted"), True)
            elif not pending.abandoned_at:
                self._queue.appendleft([pending])
                self._count([pending])
        if all(each.problem for each in self._instances):
            self._refuse(Unavailable(self.problem))
        self.freed()

    def _refuse(self, error: ModelportError) -> None:
        """Answer everything that waits with ``error``."""
        queue, self._queue = self._queue, deque()
        for batch in queue:
            for pending in batch:
                self._uncount(pending)
                pending.settle(error, True)

    def _abandon(self, pending: PendingRequest) -> None:
        """Nobody waits for ``pending`` any more."""
        if pending.instance is not None:
            pending.instance.cancel(pending)
        elif not pending.abandoned_at:
            pending.abandoned_at = self._host.loop.time()
            pending.executed()
            self._uncount(pending)

    def _count(self, batch: Sequence[PendingRequest]) -> None:
        for pending in batch:
            pending.queued = True
        self._queued += len(batch)

    def _uncount(self, pending: PendingRequest) -> None:
        self._queued -= pending.queued
        pending.queued = False


def completed_config(config: ModelConfig, completed: object, name: str) -> ModelConfig:
    """``config`` with what ``auto_complete_config`` of the model ``name`` has made of it, if any.

    Raises:
        InvalidArgument: that is no configuration.
    """
    if completed is None:
        return config
    if not isinstance(completed, dict):
        raise InvalidArgument("auto_complete_config has returned no configuration")
    part = {key: completed[key] for key in _COMPLETED if key in completed}
    found = pb.ModelConfig()
    found.CopyFrom(config)
    for key in _COMPLETED:
        found.ClearField(key)
    try:
        json_format.ParseDict(part, found)
        configuration.signature(found)
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"auto_complete_config of model '{name}': {' '.join(str(error).split())}"
        ) from error
    return found


def model_arguments(config: ModelConfig, name: str, version: int, folder: Path) -> dict[str, str]:
    """The arguments of ``initialize``, but those of one instance."""
    return {
        "model_config": json.dumps(configuration.to_json(config)),
        "model_name": name,
        "model_version": str(version),
        "model_repository": str(folder.parent),
    }


async def _start(instance: Instance) -> None:
    await instance.launch("")
    await instance.initialize()


def _is_wanted(pending: PendingRequest) -> bool:
    if pending.abandoned_at:
        return False
    if pending.deadline.expired:
        pending.settle(TimedOut(), True)
        return False
    return True


def instance_names(groups: Sequence[Any]) -> list[InstanceName]:
    """Name and place of every instance, as Triton's."""
    found: list[InstanceName] = []
    for group in groups:
        kind = _KINDS.get(group.kind, "CPU")
        devices = [str(gpu) for gpu in group.gpus] if kind == "GPU" and group.gpus else ["0"]
        places = [device for device in devices for _ in range(group.count)]
        names = (f"{group.name}_{index}" for index in range(len(places)))
        limits = group.rate_limiter.SerializeToString()
        found += [(name, (kind, at, limits)) for name, at in zip(names, places, strict=True)]
    return found
