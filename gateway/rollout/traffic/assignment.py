"""Assignment of requests to the sides of a rollout: at random, or sticky by a key.

The candidate serves the keys whose hash is below its share. A key therefore stays on its side as
the share grows, in every process, and every rollout divides the keys in its own way.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from modelport.gateway.access.context import principal_name
from modelport.gateway.rollout.plan import AssignmentKind, RolloutPlan
from modelport.gateway.rollout.traffic.request_routing import CURRENT
from modelport.gateway.types import InferRequest

_HASH_BYTES = 8
_HASHES = 1 << 8 * _HASH_BYTES

#: Returns the key of a request; empty if it has none.
KeyOf = Callable[[InferRequest], bytes]


def position(rollout_id: str, key: bytes) -> float:
    """The place of ``key`` in [0, 1): the candidate serves it if its share is larger."""
    secret = rollout_id.encode()[: hashlib.blake2b.MAX_KEY_SIZE]
    digest = hashlib.blake2b(key, key=secret, digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest) / _HASHES


class RequestAssignment:
    """The assignment of a plan. Requests without a key are assigned at random.

    So the candidate gets its share of them too, as the statistics of the rollout require.
    """

    def __init__(self, plan: RolloutPlan) -> None:
        self._id = plan.id
        self._parameter = plan.parameter
        kinds: dict[AssignmentKind, KeyOf] = {
            AssignmentKind.REQUEST: lambda request: b"",
            AssignmentKind.HEADER: _header,
            AssignmentKind.PARAMETER: self._parameter_value,
            AssignmentKind.PRINCIPAL: _principal,
        }
        #: The key of a request; empty if it has none.
        self.key: KeyOf = kinds[plan.assignment]

    def candidate_serves(self, key: bytes, share: float) -> bool:
        """Whether a request with ``key`` belongs to the ``share`` of the candidate."""
        return (position(self._id, key) if key else random.random()) < share

    def _parameter_value(self, request: InferRequest) -> bytes:
        value = request.parameters.get(self._parameter)
        return b"" if value is None else str(value).encode("utf-8", "surrogatepass")


def _principal(_: InferRequest) -> bytes:
    return principal_name().encode("utf-8", "surrogatepass")


def _header(_: InferRequest) -> bytes:
    routing = CURRENT.get()
    return b"" if routing is None else routing.key
