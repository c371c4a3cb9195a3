"""Triton's rate limiter: executions of all models take turns, and share named resources.

Every execution takes an instance of its model, and the resources that the instance's group lists.
The instance whose executions with the next one, times its priority, are fewest is next; until its
resources are free, no other instance that waits goes before it. Only the event loop allocates.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from modelport.gateway.backends.base import Execution
from modelport.gateway.backends.capabilities import Together
from modelport.gateway.errors import InvalidArgument, QueueFull
from modelport.gateway.repository.config import DEFAULT_MAX_QUEUE_SIZE, ModelConfig
from modelport.gateway.runtime.timer_wheel import within
from modelport.gateway.types import (
    NO_DEADLINE,
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
    finished,
)

T = TypeVar("T")
#: A name, and the device that has the resource; None: the whole system (``global``).
Resource = tuple[str, int | None]
#: Counts of ``--rate-limit-resource`` by name and device; None: every device.
ExplicitResources = Mapping[Resource, int]


@dataclass(slots=True, eq=False)
class LimitedInstance:
    """An instance, in the accounts of the rate limiter; any instance of the model executes."""

    needs: Mapping[Resource, int]
    priority: int
    executions: float = 0

    @property
    def turn(self) -> float:
        """The instance with the lowest one is next."""
        return (self.executions + 1) * self.priority


Turn = asyncio.Future[LimitedInstance]


class LimitedModel:
    """The instances of a model version whose executions are limited."""

    def __init__(self, limiter: RateLimiter, instances: Sequence[LimitedInstance]) -> None:
        self._limiter, self.instances = limiter, instances
        self.free = list(instances)
        self.waiting: deque[Turn] = deque()

    def infer(self, infer: Infer, execution: Execution) -> Infer:
        """Make each call of ``infer`` an execution."""

        async def limited(request: InferRequest, deadline: Deadline) -> InferResponse:
            return await self._execute(
                lambda: finished(infer(request, deadline)), execution, [request], deadline
            )

        return limited

    def together(self, together: Together, execution: Execution) -> Together:
        """Make each call of ``together`` an execution."""

        async def limited(requests: Sequence[InferRequest], *rest: Any) -> Any:
            run = lambda: together(requests, *rest)  # noqa: E731
            return await self._execute(run, execution, requests, NO_DEADLINE)

        return limited

    async def _execute(
        self,
        run: Callable[[], Awaitable[T]],
        execution: Execution,
        requests: Sequence[InferRequest],
        deadline: Deadline,
    ) -> T:
        asked_ns = time.perf_counter_ns()
        instance = await self._limiter.allocate(self, deadline)
        waited_ns = time.perf_counter_ns() - asked_ns
        for request in requests:
            request.timing.queue_ns += waited_ns

        async def ran() -> T:
            try:
                return await run()
            finally:
                self._limiter.release(self, instance)

        if execution.interruptible:
            return await ran()
        # The execution goes on, with its resources, when its caller has gone.
        task = asyncio.get_running_loop().create_task(ran())
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)


class RateLimiter:
    """The resources of a process, and the instances that take them.

    Args:
        explicit: the counts of resources; empty: of each, the most that an instance needs.
    """

    def __init__(self, explicit: ExplicitResources) -> None:
        self._explicit = explicit
        #: Of models that are loaded, or whose last execution has not ended. Loads are in threads.
        self._models: weakref.WeakSet[LimitedModel] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._allocated: Counter[Resource] = Counter()
        #: Instances that wait for their turn, by it, their priority and their arrival.
        self._staged: list[tuple[tuple[float, int, int], LimitedInstance, LimitedModel, Turn]] = []
        self._arrivals = itertools.count()

    def limit(self, config: ModelConfig) -> LimitedModel | None:
        """Register the instances of ``config``; None: they are not limited.

        Raises:
            InvalidArgument: an instance could never execute, or a resource is both of the system
                and of a device.
        """
        if not is_limited(config):
            return None
        instances = list(_instances(config))
        with self._lock:
            others = [each for model in self._models for each in model.instances]
            self._check([*others, *instances])
            # A new instance takes no turns that others had before.
            least = min((each.executions * each.priority for each in others), default=0.0)
            for each in instances:
                each.executions = least / each.priority
            model = LimitedModel(self, instances)
            self._models.add(model)
        return model

    def _check(self, instances: Sequence[LimitedInstance]) -> None:
        most = _most(instances)
        for name, device in most:
            if device is not None and (name, None) in most:
                raise InvalidArgument(
                    f'Resource "{name}" is present as both global and device-specific resource in '
                    "the model configuration."
                )
        for resource, needed in most.items() if self._explicit else ():
            count = self._explicit_count(resource)
            if count < needed:
                raise InvalidArgument(
                    f'Resource count for "{resource[0]}" is limited to {count} which will prevent '
                    "scheduling of one or more model instances, the minimum required count is "
                    f"{needed}"
                )

    def _explicit_count(self, resource: Resource) -> int:
        """The count of a resource; that of the whole system is the largest of any device."""
        name, device = resource
        return max(
            (
                count
                for (known, where), count in self._explicit.items()
                if known == name and (device is None or where in (device, None))
            ),
            default=0,
        )

    # -- allocation -------------------------------------------------------------------------------

    async def allocate(self, model: LimitedModel, deadline: Deadline) -> LimitedInstance:
        """Wait for an instance of ``model`` and its resources; ``release`` gives them back.

        Raises:
            QueueFull: too many executions wait.
            TimedOut: the deadline came first.
        """
        if len(model.waiting) >= DEFAULT_MAX_QUEUE_SIZE:
            raise QueueFull
        turn: Turn = asyncio.get_running_loop().create_future()
        model.waiting.append(turn)
        self._stage(model)
        try:
            return await within(turn, deadline)
        except BaseException:
            if turn.done() and not turn.cancelled():  # it came at the same moment
                self.release(model, turn.result(), executed=False)
            else:
                if turn in model.waiting:
                    model.waiting.remove(turn)
                self._stage(model)
            raise

    def release(
        self, model: LimitedModel, instance: LimitedInstance, executed: bool = True
    ) -> None:
        """Give back an instance and its resources."""
        instance.executions += executed
        self._allocated.subtract(instance.needs)
        model.free.append(instance)
        self._stage(model)

    def _stage(self, model: LimitedModel) -> None:
        """Let free instances of ``model`` wait for their turns, and grant those that have come."""
        self._stage_free(model)
        while self._staged:
            _, instance, model, turn = self._staged[0]
            if turn.done():
                heapq.heappop(self._staged)
                model.free.append(instance)
                self._stage_free(model)
            elif self._has(instance.needs):
                heapq.heappop(self._staged)
                self._allocated.update(instance.needs)
                turn.set_result(instance)
            else:
                return

    def _stage_free(self, model: LimitedModel) -> None:
        while model.waiting and model.free:
            turn = model.waiting.popleft()
            if not turn.done():
                instance = min(model.free, key=lambda each: each.turn)
                model.free.remove(instance)
                rank = (instance.turn, instance.priority, next(self._arrivals))
                heapq.heappush(self._staged, (rank, instance, model, turn))

    def _has(self, needs: Mapping[Resource, int]) -> bool:
        if not needs:
            return True
        if self._explicit:
            counts = {resource: self._explicit_count(resource) for resource in needs}
        else:
            with self._lock:
                counts = _most(each for model in self._models for each in model.instances)
        return all(self._allocated[each] + needed <= counts[each] for each, needed in needs.items())


def is_limited(config: ModelConfig) -> bool:
    """Whether an instance has resources or a priority; others execute at any time."""
    return any(group.HasField("rate_limiter") for group in config.instance_group)


def _most(instances: Iterator[LimitedInstance] | Sequence[LimitedInstance]) -> dict[Resource, int]:
    """The most of each resource that one of ``instances`` needs."""
    most: Counter[Resource] = Counter()
    for instance in instances:
        most |= Counter(instance.needs)
    return most


def _instances(config: ModelConfig) -> Iterator[LimitedInstance]:
    for group in config.instance_group:
        limits = group.rate_limiter
        for device in (list(group.gpus) or [0]) * max(1, group.count):
            needs = {
                (resource.name, None if getattr(resource, "global") else device): resource.count
                for resource in limits.resources
                if resource.count
            }
            yield LimitedInstance(needs, max(1, limits.priority))
