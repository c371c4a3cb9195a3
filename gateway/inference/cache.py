"""The response cache: responses by model, version and request content, in a limited size.

The semantics are Triton's (its ``docs/user_guide/response_cache.md``), except for the key: a keyed
hash of 256 bits instead of 64, which also covers datatypes, shapes, the signature, the requested
outputs and the parameters. Classification is applied after the cache. The key of an ensemble's
responses also covers the loads of the models of its steps, so that they do not outlive these.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import chain, count
from operator import attrgetter

import numpy as np
import structlog

from modelport.gateway.backend_registry import PIPELINE
from modelport.gateway.backends.backend_host import Loads
from modelport.gateway.backends.base import Backend
from modelport.gateway.backends.capabilities import ComposedBackend
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.runtime import offload
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import (
    Answer,
    Array,
    Datatype,
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
    finished,
)

log = structlog.get_logger("modelport.cache")

#: Larger inputs are hashed in a thread, because hashing blocks the event loop (1 MiB: 1.5 ms).
INLINE_BYTES = 256 * 1024
#: Inputs of more BYTES elements are hashed in the thread without summing their lengths.
_COUNTED_ELEMENTS = 1024
KEY_BYTES = 32
#: The size of an entry besides its data: the key, the slot in the table, the response objects.
ENTRY_BYTES = 464
TENSOR_BYTES = 192
#: Parameters without effect on the values of the response.
_WITHOUT_EFFECT = frozenset(
    {"binary_data_output", "timeout", "priority", "triton_enable_empty_final_response"}
)
_SEQUENCE = frozenset({"sequence_id", "sequence_start", "sequence_end"})
_loads = count()


class ResponseCache:
    """The responses of all models, at most ``size`` bytes; evicts the least recently used.

    Only the event loop uses the entries. ``used_bytes`` includes the data, BYTES objects and the
    objects around them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used_bytes = 0
        #: The key of the hash, so that clients cannot construct collisions.
        self.secret = os.urandom(KEY_BYTES)
        #: Copies of responses, with read-only arrays, and their sizes.
        self._entries: OrderedDict[bytes, tuple[InferResponse, int]] = OrderedDict()

    def look_up(self, key: bytes) -> InferResponse | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        # Views, because the owner of an array could make it writeable again.
        return _copy(entry[0], np.ndarray.view)

    def insert(self, key: bytes, response: InferResponse) -> bool:
        """Store a copy of ``response`` unless it exceeds the cache; whether it is stored."""
        size = _size_bytes(response)
        if size > self.size or key in self._entries:  # stored by an identical request
            return key in self._entries
        while self.used_bytes + size > self.size:
            self.used_bytes -= self._entries.popitem(last=False)[1][1]
        self._entries[key] = _copy(response, _frozen), size
        self.used_bytes += size
        return True


def _copy(response: InferResponse, copied: Callable[[Array], Array]) -> InferResponse:
    """A response with ``copied`` arrays; its ``id``, which is the request's, is left out."""
    outputs = [Tensor(t.name, t.datatype, copied(t.data)) for t in response.outputs]
    return InferResponse(
        response.model_name, response.model_version, outputs, parameters=dict(response.parameters)
    )


def _frozen(data: Array) -> Array:
    copy = np.array(data, order="C", copy=True)
    copy.flags.writeable = False
    return copy


def _size_bytes(response: InferResponse) -> int:
    size = ENTRY_BYTES
    for tensor in response.outputs:
        data = tensor.data
        size += TENSOR_BYTES + sys.getsizeof(tensor.name) + data.nbytes
        if data.dtype == object:
            size += sum(map(sys.getsizeof, data.flat))
    return size + sum(map(sys.getsizeof, chain(*response.parameters.items())))


class CachedInfer:
    """The ``infer`` of one loaded version behind the cache.

    Concurrent identical requests are all computed, as in Triton: a request that waited for another
    would share its deadline, its cancellation and its place in the batcher's queue.
    """

    def __init__(
        self,
        infer: Infer,
        store: ResponseCache,
        name: str,
        number: int,
        step_loads: Callable[[], Loads | None] = lambda: (),
    ) -> None:
        self._infer = infer
        self._store = store
        self._step_loads = step_loads
        self._prefix = hashlib.blake2b(key=store.secret, digest_size=KEY_BYTES)
        self._prefix.update(self.identity(name, number))

    def identity(self, name: str, number: int) -> bytes:
        """The part of the key for this version.

        It contains a count of loads, because a version may be reloaded with other content.
        """
        return _framed(repr((name, number, next(_loads))))

    def infer(self, request: InferRequest, deadline: Deadline) -> Answer:
        if request.parameters and not _SEQUENCE.isdisjoint(request.parameters):
            return self._infer(request, deadline)  # depends on earlier requests
        loads = self._step_loads()
        if loads is None:
            return self._infer(request, deadline)
        started = time.perf_counter_ns()
        if sum(_hashed_bytes(tensor.data) for tensor in request.inputs) > INLINE_BYTES:
            return self._hashed(loads, request, deadline, started)
        key = self.key(request, loads)
        return self._looked_up(key, loads, request, deadline, started)

    async def _hashed(
        self, loads: Loads, request: InferRequest, deadline: Deadline, started: int
    ) -> InferResponse:
        key = await offload.run(partial(self.key, request, loads), deadline)
        return await finished(self._looked_up(key, loads, request, deadline, started))

    def _looked_up(
        self, key: bytes, loads: Loads, request: InferRequest, deadline: Deadline, started: int
    ) -> Answer:
        found = self._store.look_up(key)
        lookup_ns = time.perf_counter_ns() - started
        if request.span is not None:
            request.span.child("cache", started, started + lookup_ns, cache_hit=found is not None)
        if found is not None:
            request.timing.cache_hit_ns = lookup_ns
            return found
        answer = self._infer(request, deadline)
        if not isinstance(answer, InferResponse):
            return self._inserted_later(key, loads, request, answer, lookup_ns)
        return self._inserted(key, loads, request, answer, lookup_ns)

    async def _inserted_later(
        self,
        key: bytes,
        loads: Loads,
        request: InferRequest,
        answer: Awaitable[InferResponse],
        lookup_ns: int,
    ) -> InferResponse:
        return self._inserted(key, loads, request, await answer, lookup_ns)

    def _inserted(
        self,
        key: bytes,
        loads: Loads,
        request: InferRequest,
        response: InferResponse,
        lookup_ns: int,
    ) -> InferResponse:
        started = time.perf_counter_ns()
        if self._step_loads() == loads:  # or else another load may have answered a step
            self._store.insert(key, response)
        request.timing.cache_miss_ns = lookup_ns + time.perf_counter_ns() - started
        return response

    def key(self, request: InferRequest, loads: Loads = ()) -> bytes:
        """Hash everything on which the response depends.

        The header contains every length, so different contents never give the same bytes. ``repr``
        distinguishes types (1, 1.0, True, '1') and escapes the ends of strings.
        """
        state = self._prefix.copy()
        inputs = request.inputs
        if len(inputs) > 1:
            inputs = sorted(inputs, key=attrgetter("name"))
        head = [(t.name, t.datatype.value, t.data.shape) for t in inputs]
        parameters: list[tuple[str, Parameter]] = []
        if request.parameters:
            parameters = sorted(
                (key, value)
                for key, value in request.parameters.items()
                if key not in _WITHOUT_EFFECT
            )
        state.update(_framed(repr((head, request.outputs, parameters, request.signature, loads))))
        for tensor in inputs:
            if tensor.datatype is Datatype.BYTES:
                items = tensor.data.reshape(-1).tolist()
                state.update(np.fromiter(map(len, items), np.dtype("<u8"), len(items)).data)
                state.update(b"".join(items))
            else:
                data = np.ascontiguousarray(tensor.data)
                state.update(data.reshape(-1).view(np.uint8).data)
        return state.digest()


def _framed(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return len(content).to_bytes(8, "little") + content


def _hashed_bytes(data: Array) -> int:
    if data.dtype != object:
        return data.nbytes
    return INLINE_BYTES + 1 if data.size > _COUNTED_ELEMENTS else sum(map(len, data.flat))


def check(name: str, config: ModelConfig) -> None:
    """Raise if ``config`` enables the cache for a model that cannot have one.

    Raises:
        InvalidArgument: the model is decoupled.
    """
    if config.response_cache.enable and config.model_transaction_policy.decoupled:
        raise InvalidArgument(
            f"Response Cache does not currently support model {name} with 'decoupled' transaction "
            "policy. Please disable the response cache."
        )


def wrap(
    infer: Infer,
    name: str,
    number: int,
    backend: Backend,
    statistics: Statistics,
    store: ResponseCache | None,
) -> Infer:
    """Put the cache in front of ``infer`` if the model enables it and the server has one."""
    if not backend.config.response_cache.enable:
        return infer
    if backend.config.platform == PIPELINE.platform:
        # A response may lack what a step has not computed in time.
        _warn(name, number, "enable it on the models of its steps")
        return infer
    if store is None:
        _warn(name, number, "the server has no cache; set --cache-config local,size=BYTES")
        return infer
    statistics.cached = True
    if isinstance(backend, ComposedBackend):
        return CachedInfer(infer, store, name, number, backend.step_loads).infer
    return CachedInfer(infer, store, name, number).infer


def _warn(name: str, number: int, reason: str) -> None:
    log.warning("response_cache has no effect", model=name, version=number, reason=reason)
