"""The ``dynamic_batching`` settings of a model, checked at load with Triton's messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import DEFAULT_MAX_QUEUE_SIZE, ModelConfig
from modelport.gateway.types import InferRequest

#: ``ModelQueuePolicy.TimeoutAction``
_REJECT, _DELAY = 0, 1


class QueuePolicy(NamedTuple):
    """The queue policy of one priority level.

    Attributes:
        max_size: the most queued requests of the level (``max_queue_size``).
        timeout_seconds: the longest wait; infinite: no timeout.
        delays: at the timeout, a request lets the others of its level pass instead of being
            refused.
        allow_override: a request's ``timeout`` applies if it is shorter.
    """

    max_size: int = DEFAULT_MAX_QUEUE_SIZE
    timeout_seconds: float = math.inf
    delays: bool = False
    allow_override: bool = False

    def timeout(self, request: InferRequest) -> float:
        """The longest wait of ``request`` in seconds."""
        asked = request.parameters.get("timeout", 0) if self.allow_override else 0
        if not asked:
            return self.timeout_seconds
        return min(self.timeout_seconds, int(asked) / 1e6)


class BatchingSettings(NamedTuple):
    """``max_size`` and ``preferred_sizes`` count batch elements."""

    max_size: int
    preferred_sizes: frozenset[int]
    delay_seconds: float
    preserve_ordering: bool
    levels: int
    default_level: int
    policies: Mapping[int, QueuePolicy]
    default_policy: QueuePolicy
    instances: int

    def level(self, request: InferRequest) -> int:
        """The priority level of ``request``, 1 is the highest; the default if there is no such
        level."""
        asked = request.parameters.get("priority", 0)
        return int(asked) if 0 < int(asked) <= self.levels else self.default_level

    def one_by_one(self) -> BatchingSettings:
        """The same queue without batches of several requests."""
        return self._replace(max_size=1, preferred_sizes=frozenset({1}), delay_seconds=0.0)

    def policy(self, level: int) -> QueuePolicy:
        return self.policies.get(level, self.default_policy)


def read(config: ModelConfig) -> BatchingSettings | None:
    """Read ``dynamic_batching``, whether or not it has an effect here; None: there is none.

    Raises:
        InvalidArgument: a size, level or policy is invalid.
    """
    return settings(config) if config.HasField("dynamic_batching") else None


def settings(config: ModelConfig) -> BatchingSettings:
    """The settings of ``config``, which are the defaults without ``dynamic_batching``.

    Raises:
        InvalidArgument: as ``read``.
    """
    batching, name = config.dynamic_batching, config.name
    for size in batching.preferred_batch_size:
        if size <= 0:
            raise InvalidArgument(f"dynamic batching preferred size must be positive for {name}")
        if size > config.max_batch_size:
            raise InvalidArgument(
                f"dynamic batching preferred size must be <= max batch size for {name}, and {size} "
                f"is more than {config.max_batch_size}"
            )
    for each in _policies(batching):
        if each.timeout_action not in (_REJECT, _DELAY):
            raise InvalidArgument(
                f"timeout_action must be REJECT or DELAY for {name}, not {each.timeout_action}"
            )
    _check_levels(batching, name)
    if batching.preserve_ordering:
        _check_ordering(batching, name)
    max_size = max(1, config.max_batch_size)
    policies = {level: _policy(each) for level, each in batching.priority_queue_policy.items()}
    return BatchingSettings(
        max_size=max_size,
        preferred_sizes=frozenset(batching.preferred_batch_size) or frozenset({max_size}),
        delay_seconds=batching.max_queue_delay_microseconds / 1e6,
        preserve_ordering=batching.preserve_ordering,
        levels=batching.priority_levels,
        default_level=batching.default_priority_level,
        policies=policies,
        default_policy=_policy(batching.default_queue_policy),
        instances=configuration.instance_count(config),
    )


def _policy(policy: Any) -> QueuePolicy:
    microseconds = policy.default_timeout_microseconds
    return QueuePolicy(
        max_size=policy.max_queue_size or DEFAULT_MAX_QUEUE_SIZE,
        timeout_seconds=microseconds / 1e6 if microseconds else math.inf,
        delays=policy.timeout_action == _DELAY,
        allow_override=policy.allow_timeout_override,
    )


def _check_levels(batching: Any, name: str) -> None:
    levels = batching.priority_levels
    if levels == 0:
        if batching.default_priority_level or batching.priority_queue_policy:
            raise InvalidArgument(
                "default_priority_level and priority_queue_policy need priority_levels, which is 0 "
                f"for {name}"
            )
        return
    if not 1 <= batching.default_priority_level <= levels:
        raise InvalidArgument(
            f"default priority level must be in range [1, {levels}] for {name}, not "
            f"{batching.default_priority_level}"
        )
    for level in batching.priority_queue_policy:
        if not 1 <= level <= levels:
            raise InvalidArgument(
                f"priority queue policy must have priority level in range [1, {levels}] for "
                f"{name}, not {level}"
            )


def _check_ordering(batching: Any, name: str) -> None:
    if batching.priority_levels > 1:
        raise InvalidArgument(
            f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
        )
    if any(each.timeout_action == _DELAY for each in _policies(batching)):
        raise InvalidArgument(
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
            f"for {name}"
        )


def _policies(batching: Any) -> Iterator[Any]:
    yield batching.default_queue_policy
    yield from batching.priority_queue_policy.values()
