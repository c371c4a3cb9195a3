"""An ``Infer`` over a graph of steps; each step is a request to another model.

A step runs as soon as its tensors are available, as an ordinary request to its model: with its own
validation and statistics, and the remaining deadline. After a decoupled step, the rest of the graph
runs once for each of its responses, for several at a time, while the step computes the next ones;
the graph's responses are in the same order. If the step has ended by the last one, that is the
final one, as in Triton. The graph is checked at load against the models' configurations at that
time; a model that is reloaded later has its own checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial

import numpy as np
import structlog

from modelport.gateway.backends.backend_host import Host, Loads
from modelport.gateway.backends.base import ELSEWHERE, Artifact
from modelport.gateway.backends.pipeline.graph import (
    Graph,
    GraphStep,
    RequestState,
    Rows,
    Steps,
    conjunction,
    gathered,
    of_rank,
)
from modelport.gateway.backends.pipeline.overlap import overlapped
from modelport.gateway.backends.python.codec import ModelAnswered
from modelport.gateway.errors import Internal, ModelportError, NotFound, Unavailable
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ENSEMBLE, ModelConfig
from modelport.gateway.runtime.timer_wheel import within
from modelport.gateway.types import (
    Deadline,
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
    TensorSpec,
    finished,
    fits,
)

log = structlog.get_logger("modelport.pipelines")

#: Responses of decoupled steps on their way through the rest of a graph, of one request.
_MOST_OVERLAPPING = 64
_UNLIMITED = contextlib.nullcontext()


class GraphBackend:
    """An ``Infer`` over a graph of steps."""

    problem = ""
    execution = ELSEWHERE

    def __init__(self, artifact: Artifact, host: Host, config: ModelConfig, graph: Graph) -> None:
        self.config = config
        self._name, self._version = artifact.model_name, artifact.version
        self._host, self._graph, self._steps = host, graph, graph.steps
        self._where = f"in {graph.kind} '{self._name}'"
        signature = configuration.signature(config)
        self._inputs = tuple(spec.name for spec in signature.inputs)
        self._outputs = {spec.name: spec for spec in signature.outputs}
        self._batch = (-1,) if signature.max_batch_size else ()
        self._maker = {ours: step for step in self._steps for _, ours in step.outputs}
        decoupled = sum(step.decoupled for step in self._steps)
        if decoupled:
            self.config = copy.deepcopy(config)
            self.config.model_transaction_policy.decoupled = True
        most = config.ensemble_scheduling.max_inflight_requests
        #: By step, if its requests in flight are limited, for all requests together.
        self._places = {step.name: asyncio.Semaphore(most) for step in self._steps if most}
        overlapping = min(most * len(self._steps) or _MOST_OVERLAPPING, _MOST_OVERLAPPING)
        # Decoupled steps behind one another multiply.
        self._overlapping = max(1, round(overlapping ** (1 / max(1, decoupled))))

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        started = time.perf_counter_ns()
        request.timing.begun = True  # its steps wait for their models
        state = self._state(request)
        await self._advance(self._wanted(request), state, request, deadline)
        request.timing.compute_infer_ns = time.perf_counter_ns() - started
        return self._response(request, state)

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield one response for each response of the last decoupled step."""
        request.timing.begun = True
        results = self._branch(self._wanted(request), self._state(request), request, deadline)
        async with contextlib.aclosing(results):
            async for state in results:
                if not state.final:
                    await asyncio.sleep(0)  # an end that has arrived meanwhile counts
                response = self._response(request, state)
                if response.outputs:
                    yield response

    async def _branch(
        self, waiting: Steps, state: RequestState, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[RequestState, None]:
        waiting = await self._advance(waiting, state, request, deadline)
        if not waiting:
            yield state
            return
        step = next((step for step in waiting if state.is_ready(step)), None)
        if step is None:  # a decoupled model has omitted an output that the rest needs
            return
        rest = tuple(each for each in waiting if each is not step)
        results = self._states(step, state, request, deadline)
        if rest:
            branch = partial(self._branch, rest, request=request, deadline=deadline)
            results = overlapped(results, branch, self._overlapping)
        async with contextlib.aclosing(results):
            async for result in results:
                yield result

    async def _states(
        self, step: GraphStep, state: RequestState, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[RequestState, None]:
        """The state after each response of a decoupled step, or once it is skipped."""
        try:
            asked, rows = self._request(step, state, request)
            if asked is None:
                found = state.copy()
                found.skip(step)
                yield found
                return
            limited, response = deadline.earliest(step.timeout_seconds), None
            async with (
                self._place(step, limited),
                contextlib.aclosing(self._host.stream(asked, limited)) as responses,
            ):
                async for response in responses:
                    found = state.copy()
                    found.add(step, response, rows)
                    yield found
            if response is not None:
                response.final = True
        except ModelportError as error:
            raise self._explained(step, error) from error

    async def _advance(
        self, waiting: Steps, state: RequestState, request: InferRequest, deadline: Deadline
    ) -> Steps:
        """Run all steps that need no decoupled step; return the steps that remain."""
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                ready = [step for step in waiting if not step.decoupled and state.is_ready(step)]
                waiting = tuple(step for step in waiting if step not in ready)
                if not ready and not running:
                    return waiting
                if len(ready) == 1 and not running:
                    await self._run(ready[0], state, request, deadline)
                    continue
                running |= {
                    asyncio.create_task(self._run(step, state, request, deadline)) for step in ready
                }
                done, running = await asyncio.wait(running, return_when="FIRST_COMPLETED")
                for task in done:
                    task.result()
        finally:
            for task in running:
                task.cancel()
            for task in running:
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    def _place(self, step: GraphStep, deadline: Deadline) -> AbstractAsyncContextManager[None]:
        """A place among the step's requests in flight, which may be limited."""
        places = self._places.get(step.name)
        return _UNLIMITED if places is None else _taken(places, deadline)

    def _state(self, request: InferRequest) -> RequestState:
        tensors = {tensor.name: tensor for tensor in request.inputs}
        state = RequestState(self._rows(request), tensors)
        state.rows = {name: state.no_rows for name in self._inputs if name not in tensors}
        return state

    def _rows(self, request: InferRequest) -> int:
        return len(request.inputs[0].data) if self._batch and request.inputs else 1

    def _wanted(self, request: InferRequest) -> Steps:
        """The steps that the requested outputs depend on; like Triton, skip the others."""
        if not request.outputs:
            return self._steps
        needed: set[str] = set()
        names = [source for name in request.outputs for source in self._graph.outputs[name]]
        while names:
            step = self._maker.get(name) if isinstance(name := names.pop(), str) else None
            if step is not None and step.name not in needed:
                needed.add(step.name)
                names += step.needs
        return tuple(step for step in self._steps if step.name in needed)

    def _request(
        self, step: GraphStep, state: RequestState, request: InferRequest
    ) -> tuple[InferRequest | None, Rows | None]:
        """The request of a step, and its rows (None: all); no request if the step is skipped."""
        rows: Rows | None = None
        for condition in step.conditions:
            rows = conjunction(rows, condition.holds(state))
        found = []
        for each in step.inputs:
            tensor, have = state.resolve(each.sources)
            if tensor is not None:
                rows = conjunction(rows, have)
                found.append((each, tensor))
            elif not each.optional:
                return None, None
        if rows is not None and not rows.any():
            return None, None
        if rows is not None and rows.all():
            rows = None
        inputs, single = [], []
        for each, tensor in found:
            data = gathered(tensor, rows)
            # New tensors, because a model's validation reshapes them.
            inputs.append(Tensor(each.name, tensor.datatype, of_rank(data, each.rank)))
            if data.ndim < each.rank:
                single.append(inputs[-1])
        if single and step.batches:  # a constant, or of a model that does not batch
            most = max(len(tensor.data) for tensor in inputs)
            for tensor in single:
                tensor.data = np.repeat(tensor.data, most, axis=0)
        asked = InferRequest(
            step.model,
            inputs,
            tuple(theirs for theirs, _ in step.outputs),
            step.version,
            id=request.id,
            parameters=request.parameters,
            trace=request.trace,
            caller=request.caller,
        )
        if request.span is not None:
            asked.span = request.span.child("step", step=step.name, step_model=step.model)
        return asked, rows

    async def _run(
        self, step: GraphStep, state: RequestState, request: InferRequest, deadline: Deadline
    ) -> None:
        try:
            asked, rows = self._request(step, state, request)
            if asked is not None:
                limited = deadline.earliest(step.timeout_seconds)
                try:
                    async with self._place(step, limited):
                        answer = await finished(self._host.infer(asked, limited))
                finally:
                    if asked.span is not None:
                        asked.span.end()
                state.add(step, answer, rows)
                return
        except ModelportError as error:
            if not step.skips or deadline.expired:
                raise self._explained(step, error) from error
        state.skip(step)

    def _response(self, request: InferRequest, state: RequestState) -> InferResponse:
        outputs = []
        for name in request.outputs or self._outputs:
            tensor, rows = state.resolve(self._graph.outputs[name])
            if tensor is not None and rows is None:
                outputs.append(self._output(self._outputs[name], tensor))
            elif self._graph.kind == ENSEMBLE and tensor is None:
                log.debug(f"Composing models did not output tensor {name}", model=self._name)
            elif not self.config.model_transaction_policy.decoupled:
                raise Internal(f"{self._where}, no model returned '{name}'")
        if not outputs and not self.config.model_transaction_policy.decoupled:
            raise Internal(f"{self._where}, no model returned '{name}'")
        parameters = _sequence(request)
        return InferResponse(
            self._name, self._version, outputs, parameters=parameters, final=state.final
        )

    def _output(self, spec: TensorSpec, tensor: Tensor) -> Tensor:
        """``tensor``, unless its model has been reloaded with another signature."""
        dims, step = (*self._batch, *spec.model_dims), self._maker.get(tensor.name)
        data = of_rank(tensor.data, len(dims))
        if not fits(data.shape, dims) or tensor.datatype is not spec.datatype:
            raise Unavailable(
                f"{self._where}, output '{spec.name}' is declared {spec.datatype} with shape "
                f"{list(dims)}, but model '{step.model if step else ''}' now returns "
                f"{tensor.datatype} with shape {list(data.shape)}; load the {self._graph.kind} "
                "again"
            )
        return Tensor(spec.name, spec.datatype, data)

    def labels_of(self, output: str) -> tuple[str, ...]:
        """The labels of the step's output that is the graph's ``output``, as in Triton."""
        sources = self._graph.outputs[output]
        step, theirs = next(
            (step, theirs)
            for step in self._steps
            for theirs, ours in step.outputs
            if ours in sources
        )
        try:
            return self._host.labels_of(step.model, step.version, theirs)
        except NotFound as error:
            raise self._explained(step, error) from error

    def step_loads(self) -> Loads | None:
        """The loads of the versions that answer the steps; None: they vary by request.

        A pipeline's response may lack what a step has not computed in time, so that it varies.
        """
        found: Loads = ()
        try:
            for step in self._steps:
                loads = self._host.loads_of(step.model, step.version)
                if loads is None or self._graph.kind != ENSEMBLE:
                    return None
                found += loads
        except (NotFound, Unavailable):  # the request says which model is missing
            return None
        return found

    def _explained(self, step: GraphStep, error: ModelportError) -> ModelportError:
        """The error of a step: where it is from, and not that an unknown model was asked for."""
        where, answered = self._where, isinstance(error, ModelAnswered)
        if self._graph.kind != ENSEMBLE:
            message = f"{where}, step '{step.name}': {error}"
        elif isinstance(error, NotFound) and not answered:
            message = f"{where}: {error}"
        else:
            message = f"{where}, {error}"
        if isinstance(error, NotFound) and not answered:
            return Unavailable(message)
        explained = copy.copy(error)
        ModelportError.__init__(explained, message)
        return explained

    def unload(self) -> None:
        """Nothing to free; the models of the steps are not the graph's."""


@contextlib.asynccontextmanager
async def _taken(places: asyncio.Semaphore, deadline: Deadline) -> AsyncGenerator[None, None]:
    await within(places.acquire(), deadline)
    try:
        yield
    finally:
        places.release()


def _sequence(request: InferRequest) -> Mapping[str, Parameter]:
    """The parameters of the response to a request of a sequence, as in Triton."""
    given = request.parameters
    if not given.get("sequence_id"):
        return {}
    flags = {key: bool(given.get(key)) for key in ("sequence_start", "sequence_end")}
    return {"sequence_id": given["sequence_id"], **flags}
