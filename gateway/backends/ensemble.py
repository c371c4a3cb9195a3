"""Ensembles: Triton's ``ensemble_scheduling``, a graph of the repository's other models.

A step runs as soon as its tensors are there, as a request to its model like any other: with its own
handle, checks and statistics, and what is left of the deadline. Checked at load against the models
as they are then; a model that is loaded anew may differ, and then its own checks refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.backends.base import ELSEWHERE, Artifact, Host
from gateway.backends.ensemble_check import check
from gateway.errors import Internal, NotFound, Unavailable
from gateway.repository import config as configuration
from gateway.repository.config import ModelConfig
from gateway.types import Deadline, InferRequest, InferResponse, Tensor, TensorSpec


@dataclass(frozen=True, slots=True)
class Step:
    """``inputs``: the model's name of each, and the ensemble's; ``outputs``: the same."""

    model: str
    version: int
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]


def load(artifact: Artifact) -> EnsembleBackend:
    """Needs no file, but every model of its steps.

    Raises:
        Unavailable: a model of a step is not READY.
        InvalidArgument: the steps do not fit together, or do not fit the models.
        Internal: there is no gateway around it.
    """
    if artifact.host is None:
        raise Internal("an ensemble is served by a gateway only")
    check(artifact.model_name, artifact.config, artifact.host.config_of)
    return EnsembleBackend(artifact, artifact.host)


class EnsembleBackend:
    problem = ""
    execution = ELSEWHERE

    def __init__(self, artifact: Artifact, host: Host) -> None:
        self.config: ModelConfig = artifact.config
        self._name, self._version = artifact.model_name, artifact.version
        self._infer = host.infer
        signature = configuration.signature(self.config)
        self._inputs = frozenset(spec.name for spec in signature.inputs)
        self._outputs = {spec.name: spec for spec in signature.outputs}
        self._batch = (-1,) if signature.max_batch_size else ()
        self._steps = tuple(
            Step(
                step.model_name,
                max(0, step.model_version),
                tuple(sorted(step.input_map.items())),
                tuple(sorted(step.output_map.items())),
            )
            for step in self.config.ensemble_scheduling.step
        )
        self._maker = {ours: step for step in self._steps for _, ours in step.outputs}

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        started = time.perf_counter_ns()
        wanted = request.outputs or tuple(self._outputs)
        tensors = {tensor.name: tensor for tensor in request.inputs}
        absent = self._inputs - tensors.keys()  # optional: its models do without, or refuse
        waiting = self._steps if not request.outputs else self._needed(wanted)
        running: set[asyncio.Task[None]] = set()
        try:
            while waiting or running:
                ready = [
                    s for s in waiting if all(o in tensors or o in absent for _, o in s.inputs)
                ]
                waiting = tuple(step for step in waiting if step not in ready)
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
        outputs = [self._output(self._outputs[name], tensors[name]) for name in wanted]
        request.timing.compute_infer_ns = time.perf_counter_ns() - started
        return InferResponse(self._name, self._version, outputs)

    def _needed(self, wanted: Sequence[str]) -> tuple[Step, ...]:
        """The steps that ``wanted`` depends on, as Triton leaves out the others."""
        needed: list[Step] = []
        names = list(wanted)
        while names:
            step = self._maker.get(names.pop())
            if step is not None and step not in needed:
                needed.append(step)
                names += [ours for _, ours in step.inputs]
        return tuple(needed)

    async def _run(
        self, step: Step, tensors: dict[str, Tensor], request: InferRequest, deadline: Deadline
    ) -> None:
        inputs = [
            # Tensors of its own: a model's checks reshape what they get.
            Tensor(theirs, tensors[ours].datatype, tensors[ours].data)
            for theirs, ours in step.inputs
            if ours in tensors
        ]
        asked = InferRequest(
            step.model,
            inputs,
            tuple(theirs for theirs, _ in step.outputs),
            step.version,
            id=request.id,
            trace=request.trace,
        )
        try:
            response = await self._infer(asked, deadline)
        except NotFound as error:  # it was there when the ensemble was loaded
            raise Unavailable(f"in ensemble '{self._name}': {error}") from error
        answers: Mapping[str, Tensor] = {tensor.name: tensor for tensor in response.outputs}
        for theirs, ours in step.outputs:
            tensors[ours] = Tensor(ours, answers[theirs].datatype, answers[theirs].data)

    def _output(self, spec: TensorSpec, tensor: Tensor) -> Tensor:
        """``tensor``, unless its model has been loaded anew with another signature."""
        shape, dims = tensor.data.shape, (*self._batch, *spec.model_dims)
        fits = len(shape) == len(dims) and all(
            says in (-1, has) for says, has in zip(dims, shape, strict=True)
        )
        if not fits or tensor.datatype is not spec.datatype:
            raise Unavailable(
                f"in ensemble '{self._name}', output '{spec.name}' is declared {spec.datatype} "
                f"with shape {list(dims)}, but model '{self._maker[spec.name].model}' now gives "
                f"{tensor.datatype} with shape {list(shape)}; load the ensemble again"
            )
        return tensor

    def unload(self) -> None:
        """Its models are not its own."""
