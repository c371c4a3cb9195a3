"""Admission control: refuse a request at once if it would wait too long.

If a queue policy limits the wait, ``queue_time`` refuses requests that would exceed it. Otherwise
nothing is refused without an overload; during one, ``guard`` keeps the queue just long enough to
keep the model busy and refuses the rest, as ``controller`` decides.
"""

from __future__ import annotations

import math

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import ELSEWHERE, Execution
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.admission.controller import OverloadController, OverloadedModels
from modelport.gateway.inference.admission.guard import OverloadGuard
from modelport.gateway.inference.admission.queue_time import QueueTimeLimit
from modelport.gateway.inference.batching import dynamic_batching as batching
from modelport.gateway.inference.batching.dynamic_batching import QueuePolicy
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import Infer

__all__ = ["OverloadController", "OverloadGuard", "OverloadedModels", "QueueTimeLimit", "wrap"]

#: "false": only the queue policy limits a model's queue. "true": admission control beside a policy.
ADMISSION_CONTROL = "admission_control"
#: Closed-loop clients do not trigger overload protection below this many requests in flight.
MIN_PENDING_REQUESTS = "admission_control_min_pending_requests"
DEFAULT_MIN_PENDING_REQUESTS = 256


def wrap(
    infer: Infer,
    config: ModelConfig,
    execution: Execution = ELSEWHERE,
    overloaded: OverloadedModels | None = None,
) -> Infer:
    """Put admission control in front of ``infer`` if requests wait for an instance here.

    A queue policy of ``config`` that limits the wait selects ``QueueTimeLimit``; a queue without
    a policy has an ``OverloadGuard``.

    Raises:
        InvalidArgument: ``config`` contradicts itself.
    """
    own, wanted = False, batching.read(config)
    if wanted is not None:
        policies = (wanted.default_policy, *wanted.policies.values())
        if any(_bounds(policy) for policy in policies):
            infer = QueueTimeLimit(infer, wanted)
        own = config.dynamic_batching.HasField("default_queue_policy") or bool(wanted.policies)
    queues = execution.queues or (wanted is not None and not execution.batches)
    least = parameters.integer(config, MIN_PENDING_REQUESTS, DEFAULT_MIN_PENDING_REQUESTS, 1)
    if not parameters.boolean(config, ADMISSION_CONTROL, queues and not own):
        return infer
    if not queues:
        raise InvalidArgument(
            f"parameter '{ADMISSION_CONTROL}' needs a model that waits for an instance here, and "
            f"'{config.name}' runs elsewhere; limit the queue of the server that runs it"
        )
    inline = ELSEWHERE.inline if wanted and wanted.delay_seconds else execution.inline
    controller = OverloadController(configuration.instance_count(config), least, overloaded)
    priorities = wanted if wanted and wanted.levels > 1 else None
    return OverloadGuard(infer, controller, inline, priorities)


def _bounds(policy: QueuePolicy) -> bool:
    bounded = policy.allow_override or policy.timeout_seconds != math.inf
    return bounded and not policy.delays
