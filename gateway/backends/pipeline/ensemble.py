"""Ensembles: Triton's ``ensemble_scheduling`` as a graph of steps."""

from __future__ import annotations

from typing import Any

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.pipeline.ensemble_check import check, in_order
from modelport.gateway.backends.pipeline.graph import Graph, GraphStep, StepInput, check_streams
from modelport.gateway.backends.pipeline.graph_backend import GraphBackend
from modelport.gateway.errors import Internal
from modelport.gateway.repository.config import ENSEMBLE, ModelConfig


def load(artifact: Artifact) -> GraphBackend:
    """Load an ensemble. It needs no file, but the models of its steps.

    Raises:
        Unavailable: the model of a step is not READY.
        InvalidArgument: the steps contradict each other or the models.
        Internal: the loader runs outside of a gateway.
    """
    if artifact.host is None:
        raise Internal("an ensemble can only be loaded by a gateway")
    name, config = artifact.model_name, artifact.config
    models = check(name, config, artifact.host.config_of)
    steps = config.ensemble_scheduling.step
    made = tuple(_step(index, steps[index], models[index]) for index in in_order(config))
    graph = Graph(ENSEMBLE, made, {output.name: (output.name,) for output in config.output})
    check_streams(graph, [tensor.name for tensor in config.input], name)
    return GraphBackend(artifact, artifact.host, config, graph)


def _step(index: int, step: Any, model: ModelConfig) -> GraphStep:
    batch = 1 if model.max_batch_size > 0 else 0
    ranks = {tensor.name: batch + len(tensor.dims) for tensor in model.input}
    return GraphStep(
        str(index),
        step.model_name,
        max(0, step.model_version),
        tuple(
            # What is omitted is the model's to refuse, as in Triton.
            StepInput(theirs, (ours,), ranks[theirs], optional=True)
            for theirs, ours in sorted(step.input_map.items())
        ),
        tuple(sorted(step.output_map.items())),
        bool(batch),
        model.model_transaction_policy.decoupled,
    )
