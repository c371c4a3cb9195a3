"""Ensembles: Triton's ``ensemble_scheduling``, a graph of other models of the repository.

A step runs as soon as its tensors are available, as an ordinary request to its model: with its own
validation and statistics, and the remaining deadline. After a decoupled step, the rest of the graph
runs once for each of its responses. The graph is checked at load against the models' configurations
at that time; a model that is reloaded later has its own checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelport.gateway.backends.backend_host import Host
from modelport.gateway.backends.base import ELSEWHERE, Artifact
from modelport.gateway.backends.ensemble_check import check
from modelport.gateway.backends.python.codec import ModelAnswered
from modelport.gateway.errors import Internal, NotFound, Unavailable
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import (
    Array,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    TensorSpec,
    finished,
    fits,
)


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """A step of the graph.

    Attributes:
        inputs: for each, the model's name, the ensemble's name, and the rank the model takes.
        outputs: for each, the model's name and the ensemble's name.
    """

    model: str
    version: int
    inputs: tuple[tuple[str, str, int], ...]
    outputs: tuple[tuple[str, str], ...]
    decoupled: bool


Steps = tuple[EnsembleStep, ...]
#: By the ensemble's names.
Tensors = dict[str, Tensor]


def load(artifact: Artifact) -> EnsembleBackend:
    """Load an ensemble. It needs no file, but the models of its steps.

    Raises:
        Unavailable: the model of a step is not READY.
        InvalidArgument: the steps contradict each other or the models.
        Internal: the loader runs outside of a gateway.
    """
    if artifact.host is None:
        raise Internal("an ensemble can only be loaded by a gateway")
    models = check(artifact.model_name, artifact.config, artifact.host.config_of)
    return EnsembleBackend(artifact, artifact.host, models)


class EnsembleBackend:
    """An ``Infer`` over the graph of steps."""

    problem = ""
    execution = ELSEWHERE

    def __init__(self, artifact: Artifact, host: Host, models: Sequence[ModelConfig]) -> None:
        self.config: ModelConfig = artifact.config
        self._name, self._version = artifact.model_name, artifact.version
        self._host = host
        signature = configuration.signature(self.config)
        self._inputs = frozenset(spec.name for spec in signature.inputs)
        self._outputs = {spec.name: spec for spec in signature.outputs}
        self._batch = (-1,) if signature.max_batch_size else ()
        steps = zip(self.config.ensemble_scheduling.step, models, strict=True)
        self._steps = tuple(_step(step, model) for step, model in steps)
        self._maker = {ours: step for step in self._steps for _, ours in step.outputs}
        if any(step.decoupled for step in self._steps):
            self.config = copy.deepcopy(artifact.config)
            self.config.model_transaction_policy.decoupled = True

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        started = time.perf_counter_ns()
        tensors, _ = await self._advance(
            self._wanted(request), {t.name: t for t in request.inputs}, request, deadline
        )
        request.timing.compute_infer_ns = time.perf_counter_ns() - started
        return self._response(request, tensors)

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield one response for each response of the last decoupled step."""
        start = {tensor.name: tensor for tensor in request.inputs}
        results = self._branch(self._wanted(request), start, request, deadline)
        async with contextlib.aclosing(results):
            async for tensors in results:
                response = self._response(request, tensors)
                if response.outputs:
                    yield response

    async def _branch(
        self, waiting: Steps, tensors: Tensors, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[Tensors, None]:
        tensors, waiting = await self._advance(waiting, tensors, request, deadline)
        if not waiting:
            yield tensors
            return
        step = next((step for step in waiting if self._ready(step, tensors)), None)
        if step is None:  # a decoupled model has omitted an output that the rest needs
            return
        rest = tuple(each for each in waiting if each is not step)
        asked = self._request(step, tensors, request)
        async with contextlib.aclosing(self._host.stream(asked, deadline)) as responses:
            async for response in responses:
                found = {**tensors, **_outputs(step, response)}
                async with contextlib.aclosing(
                    self._branch(rest, found, request, deadline)
                ) as results:
                    async for result in results:
                        yield result

    async def _advance(
        self, waiting: Steps, tensors: Tensors, request: InferRequest, deadline: Deadline
    ) -> tuple[Tensors, Steps]:
        """Run all steps that need no decoupled step; the tensors, and the steps that remain."""
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                ready = [s for s in waiting if not s.decoupled and self._ready(s, tensors)]
                waiting = tuple(step for step in waiting if step not in ready)
                if not ready and not running:
                    return tensors, waiting
                if len(ready) == 1 and not running:
                    await self._run(ready[0], tensors, request, deadline)
                    continue
                running |= {
                    asyncio.create_task(self._run(step, tensors, request, deadline))
                    for step in ready
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

    def _ready(self, step: EnsembleStep, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the step's inputs are available; an omitted optional input never comes."""
        return all(ours in tensors or ours in self._inputs for _, ours, _ in step.inputs)

    def _wanted(self, request: InferRequest) -> Steps:
        """The steps that the requested outputs depend on; like Triton, skip the others."""
        if not request.outputs:
            return self._steps
        needed: list[EnsembleStep] = []
        names = list(request.outputs)
        while names:
            step = self._maker.get(names.pop())
            if step is not None and step not in needed:
                needed.append(step)
                names += [ours for _, ours, _ in step.inputs]
        return tuple(needed)

    def _request(
        self, step: EnsembleStep, tensors: Mapping[str, Tensor], request: InferRequest
    ) -> InferRequest:
        inputs = [
            # New tensors, because a model's validation reshapes them.
            Tensor(theirs, tensors[ours].datatype, _of_rank(tensors[ours].data, rank))
            for theirs, ours, rank in step.inputs
            if ours in tensors
        ]
        return InferRequest(
            step.model,
            inputs,
            tuple(theirs for theirs, _ in step.outputs),
            step.version,
            id=request.id,
            parameters=request.parameters,
            trace=request.trace,
            caller=request.caller,
        )

    async def _run(
        self, step: EnsembleStep, tensors: Tensors, request: InferRequest, deadline: Deadline
    ) -> None:
        try:
            asked = self._request(step, tensors, request)
            response = await finished(self._host.infer(asked, deadline))
        except ModelAnswered as error:
            raise type(error)(f"in ensemble '{self._name}', {error}") from error
        except NotFound as error:
            raise self._gone(error) from error
        tensors.update(_outputs(step, response))

    def _response(self, request: InferRequest, tensors: Mapping[str, Tensor]) -> InferResponse:
        wanted = request.outputs or self._outputs
        if not self.config.model_transaction_policy.decoupled:
            for name in wanted:
                if name not in tensors:
                    raise Internal(f"in ensemble '{self._name}', no model returned '{name}'")
        outputs = [
            self._output(self._outputs[name], tensors[name]) for name in wanted if name in tensors
        ]
        return InferResponse(self._name, self._version, outputs)

    def _output(self, spec: TensorSpec, tensor: Tensor) -> Tensor:
        """``tensor``, unless its model has been reloaded with another signature."""
        dims = (*self._batch, *spec.model_dims)
        data = _of_rank(tensor.data, len(dims))
        if not fits(data.shape, dims) or tensor.datatype is not spec.datatype:
            raise Unavailable(
                f"in ensemble '{self._name}', output '{spec.name}' is declared {spec.datatype} "
                f"with shape {list(dims)}, but model '{self._maker[spec.name].model}' now returns "
                f"{tensor.datatype} with shape {list(data.shape)}; load the ensemble again"
            )
        return Tensor(spec.name, spec.datatype, data)

    def labels_of(self, output: str) -> tuple[str, ...]:
        """The labels of the step's output that is the ensemble's ``output``, as in Triton."""
        step = self._maker[output]
        theirs = next(theirs for theirs, ours in step.outputs if ours == output)
        try:
            return self._host.labels_of(step.model, step.version, theirs)
        except NotFound as error:
            raise self._gone(error) from error

    def _gone(self, error: NotFound) -> Unavailable:
        """The error for a step's model that was removed after the ensemble was loaded."""
        return Unavailable(f"in ensemble '{self._name}': {error}")

    def unload(self) -> None:
        """Nothing to free; the models of the steps are not the ensemble's."""


def _step(step: Any, model: ModelConfig) -> EnsembleStep:
    batch = 1 if model.max_batch_size > 0 else 0
    ranks = {tensor.name: batch + len(tensor.dims) for tensor in model.input}
    return EnsembleStep(
        step.model_name,
        max(0, step.model_version),
        tuple((theirs, ours, ranks[theirs]) for theirs, ours in sorted(step.input_map.items())),
        tuple(sorted(step.output_map.items())),
        model.model_transaction_policy.decoupled,
    )


def _outputs(step: EnsembleStep, response: InferResponse) -> Tensors:
    """The step's outputs by the ensemble's names; a remote model may omit some."""
    answers = {tensor.name: tensor for tensor in response.outputs}
    return {
        ours: Tensor(ours, answers[theirs].datatype, answers[theirs].data)
        for theirs, ours in step.outputs
        if theirs in answers
    }


def _of_rank(data: Array, rank: int) -> Array:
    """``data`` with or without a batch dimension of 1, between models that batch and others."""
    shape = data.shape
    if len(shape) == rank - 1:
        return data.reshape(1, *shape)
    if len(shape) == rank + 1 and shape[0] == 1:
        return data.reshape(shape[1:])
    return data
