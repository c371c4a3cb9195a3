"""The ``sequence_batching`` settings of a model, checked at load with Triton's messages."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.batching.dynamic_batching import BatchingSettings, QueuePolicy
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.wire.proto import model_config_pb2 as pb


class SequenceSettings(NamedTuple):
    """The schedule of the sequences of a model.

    Attributes:
        idle_seconds: a sequence ends if none of its requests comes for so long.
        batched: requests have a batch dimension.
        iterative: each request is a sequence, whose model gets it until it has ended.
        slots: sequences that an instance has at a time.
        oldest: forms the batches of the strategy ``oldest``; None: it is ``direct``.
        delay_seconds: of ``direct``, the longest wait for requests of other slots.
        ready_slots: of ``direct``, this many requests wait no longer.
    """

    idle_seconds: float
    batched: bool
    iterative: bool
    slots: int
    instances: int
    oldest: BatchingSettings | None
    delay_seconds: float
    ready_slots: int


def read(config: ModelConfig) -> SequenceSettings | None:
    """Read ``sequence_batching``; None: there is none.

    Raises:
        InvalidArgument: a setting is invalid.
    """
    if not config.HasField("sequence_batching"):
        return None
    batching, name = config.sequence_batching, config.name
    if config.response_cache.enable:
        raise InvalidArgument(
            f"Response Cache does not currently support model {name} with sequence batching "
            "scheduler. Please disable the response cache."
        )
    size = max(1, config.max_batch_size)
    oldest, slots = None, size
    if batching.HasField("oldest"):
        oldest = _oldest(batching.oldest, name, size)
        if batching.oldest.max_candidate_sequences > 0:
            slots = batching.oldest.max_candidate_sequences
    utilization = batching.direct.minimum_slot_utilization
    if not 0 <= utilization <= 1:
        raise InvalidArgument(
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}"
        )
    return SequenceSettings(
        idle_seconds=batching.max_sequence_idle_microseconds / 1e6,
        batched=config.max_batch_size > 0,
        iterative=_iterative(batching, name),
        slots=slots,
        instances=configuration.instance_count(config),
        oldest=oldest,
        delay_seconds=batching.direct.max_queue_delay_microseconds / 1e6 if utilization else 0.0,
        ready_slots=math.ceil(utilization * size),
    )


def _iterative(batching: Any, name: str) -> bool:
    controls = [c.kind for each in batching.control_input for c in each.control]
    started = pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_START in controls
    if batching.iterative_sequence and (started or batching.state):
        raise InvalidArgument(
            "iterative_sequence has no control_input of CONTROL_SEQUENCE_START and no state for "
            f"{name}; remove them, and have the model read request.flags()"
        )
    return bool(batching.iterative_sequence)


def _oldest(oldest: Any, name: str, size: int) -> BatchingSettings:
    for preferred in oldest.preferred_batch_size:
        if preferred <= 0:
            raise InvalidArgument(
                f"sequence batching preferred batch size must be positive for {name}"
            )
        if preferred > size:
            raise InvalidArgument(
                f"sequence batching preferred batch size must be <= max batch size for {name}"
            )
    return BatchingSettings(
        max_size=size,
        preferred_sizes=frozenset(oldest.preferred_batch_size) or frozenset({size}),
        delay_seconds=oldest.max_queue_delay_microseconds / 1e6,
        preserve_ordering=oldest.preserve_ordering,
        levels=0,
        default_level=0,
        policies={},
        default_policy=QueuePolicy(),
        instances=1,
    )
