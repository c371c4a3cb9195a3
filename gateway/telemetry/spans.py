"""Spans: what a request did, when, and below what.

A request that is traced has its span in ``InferRequest.span``; the stages that it passes add spans
below it. Other requests have None there, so a stage tests one attribute.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from modelport.gateway.types import InferRequest, InferResponse, Tensor

#: Further spans of one trace are dropped: a pipeline or a model may cause any number.
MAX_SPANS = 1000
#: Spans that say where a model's answer comes from.
_COMPUTE = frozenset({"compute", "step", "attempt"})


class Trace:
    """The spans of one request, in the order in which they began.

    Attributes:
        id: 128 bits; it may be the client's.
        parent_id: The client's span; 0: there is none.
        sampled: Whether spans are recorded. If not, its context is only passed on.
        context: The client's context as the propagator has read it.
        inject: Makes the headers that pass a span's context on.
        dropped: Spans that found no place.
        answered_ns: When the model had answered; 0: it has not.
        tensors: Those that the model took, then those that it gave; None: nobody wants them.
    """

    __slots__ = (
        "answered_ns", "context", "dropped", "id", "inject", "parent_id", "sampled", "spans",
        "tensors",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        parent_id: int,
        sampled: bool,
        context: Any = None,
        inject: Callable[[Span], Mapping[str, str]] = lambda span: {},
    ) -> None:
        self.id, self.parent_id, self.sampled = id, parent_id, sampled
        self.context, self.inject = context, inject
        self.spans: list[Span] = []
        self.answered_ns = self.dropped = 0
        self.tensors: list[Sequence[Tensor]] | None = None


class Span:
    """A part of a trace.

    Attributes:
        parent_id: 0 for the span of the whole request, whose parent is the client's span.
        ended_ns: 0: it has not ended; times are those of ``time.perf_counter_ns``.
        client: Whether it is a request to another server.
        links: Spans of other traces that it belongs to.
        error: The message of the error by which it ended.
    """

    __slots__ = (
        "attributes", "client", "ended_ns", "error", "id", "links", "name", "parent_id",
        "started_ns", "trace",
    )  # fmt: skip

    def __init__(self, trace: Trace, parent_id: int, name: str, started_ns: int) -> None:
        self.trace, self.parent_id, self.name = trace, parent_id, name
        self.started_ns, self.ended_ns = started_ns, 0
        self.client, self.error = False, ""
        self.attributes: dict[str, Any] = {}
        self.links: list[Span] = []
        self.id = random.getrandbits(64) or 1
        if len(trace.spans) < MAX_SPANS:
            trace.spans.append(self)
        else:
            trace.dropped += 1

    def child(self, name: str, started_ns: int = 0, ended_ns: int = 0, **attributes: Any) -> Span:
        """Begin a span below this one, now or when it is said to have begun."""
        if not self.trace.sampled:
            return self
        made = Span(self.trace, self.id, name, started_ns or time.perf_counter_ns())
        made.ended_ns = ended_ns
        for key, value in attributes.items():
            made.attributes[f"modelport.{key}"] = value
        return made

    def end(self) -> None:
        """End the span now, by the exception in progress, if there is one."""
        if not self.ended_ns and self.trace.sampled:
            self.ended_ns = time.perf_counter_ns()
            error = sys.exception()
            if error is not None:
                self.error = str(error) or type(error).__name__

    def headers(self) -> Mapping[str, str]:
        """The headers that make a request to another server part of the trace."""
        return self.trace.inject(self)


#: The span whose context requests to other servers carry.
UPSTREAM: ContextVar[Span | None] = ContextVar("upstream span", default=None)


def onward() -> Mapping[str, str]:
    """The headers of a request to another server, for its part of the trace."""
    span = UPSTREAM.get()
    return {} if span is None else span.headers()


def of_batch(requests: Iterable[InferRequest], size: int) -> Span | None:
    """Begin the span of a batch, in the trace of the first request that has one.

    It links the spans of all its requests, and their traces have a span that links it.
    """
    members = [r.span for r in requests if r.span is not None and r.span.trace.sampled]
    if not members:
        return None
    batch: Span = members[0].child("batch", batch_size=size)
    batch.links.extend(members)
    for span in members:
        span.child("compute", batch.started_ns).links.append(batch)
    return batch


def answered(request: InferRequest, response: InferResponse, ended_ns: int) -> None:
    """Note that a model has answered, and that it has computed until ``ended_ns``."""
    span, timing = request.span, request.timing
    trace = span.trace
    if not trace.sampled:
        return
    if not span.parent_id:
        trace.answered_ns = time.perf_counter_ns()
        if trace.tensors is not None:
            trace.tensors += [request.inputs, response.outputs]
    computed = (each for each in trace.spans if each.parent_id == span.id and each.name in _COMPUTE)
    if not timing.cache_hit_ns and next(computed, None) is None:
        span.child("compute", ended_ns - timing.compute_infer_ns, ended_ns)


def end_batch(batch: Span) -> None:
    """End the span of a batch, and those of its requests, by the exception in progress, if any."""
    batch.end()
    for span in batch.links:
        for each in span.trace.spans:
            if batch in each.links:
                each.end()
