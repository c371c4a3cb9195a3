"""Admission: a request that would wait too long is refused at once, not after the wait.

Where a queue policy bounds the wait, ``queue_time`` refuses what would wait longer. Where none
does, nothing is refused until there is an overload: then ``guard`` keeps the queue as short as
keeps the model busy, and refuses what comes beyond, as ``controller`` says.
"""

from __future__ import annotations

import math

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import ELSEWHERE, Execution
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.admission.controller import OVERLOADED, OverloadController
from modelport.gateway.inference.admission.guard import OverloadGuard
from modelport.gateway.inference.admission.queue_time import QueueTimeLimit
from modelport.gateway.inference.batching import settings as batching
from modelport.gateway.inference.batching.settings import QueuePolicy
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import Infer

__all__ = ["OVERLOADED", "OverloadController", "OverloadGuard", "QueueTimeLimit", "wrap"]

#: With "false", a model's queue is bounded by its policy alone, in any case by its size; with
#: "true" there is admission control beside a policy.
ADMISSION_CONTROL = "admission_control"
#: So many requests in flight are no overload, however fast they came.
MIN_PENDING_REQUESTS = "admission_control_min_pending_requests"
DEFAULT_MIN_PENDING_REQUESTS = 256


def wrap(infer: Infer, config: ModelConfig, execution: Execution = ELSEWHERE) -> Infer:
    """``infer`` behind an admission, where a queue policy of ``config`` bounds the wait, or where
    requests wait for an instance and no policy bounds their queue.

    Raises:
        InvalidArgument: ``config`` asks for what cannot be.
    """
    own, batches, wanted = False, config.HasField("dynamic_batching"), None
    if batches:
        wanted = batching.read(config)
        policies = (wanted.default_policy, *wanted.policies.values())
        if any(_bounds(policy) for policy in policies):
            infer = QueueTimeLimit(infer, wanted)
        own = config.dynamic_batching.HasField("default_queue_policy") or bool(wanted.policies)
    queues = execution.queues or (batches and not execution.batches)
    least = parameters.integer(config, MIN_PENDING_REQUESTS, DEFAULT_MIN_PENDING_REQUESTS, 1)
    if not parameters.boolean(config, ADMISSION_CONTROL, queues and not own):
        return infer
    if not queues:
        raise InvalidArgument(
            f"parameter '{ADMISSION_CONTROL}' is for models that wait for an instance here, and "
            f"'{config.name}' runs elsewhere; bound the queue of the server that runs it"
        )
    delays = batches and config.dynamic_batching.max_queue_delay_microseconds
    inline = ELSEWHERE.inline if delays else execution.inline
    controller = OverloadController(configuration.instance_count(config), least)
    priorities = wanted if wanted and wanted.levels > 1 else None
    return OverloadGuard(infer, controller, inline, priorities)


def _bounds(policy: QueuePolicy) -> bool:
    bounded = policy.allow_override or policy.timeout_seconds != math.inf
    return bounded and not policy.delays
