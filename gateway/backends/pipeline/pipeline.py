"""Pipelines: ``pipeline.toml`` as a graph of steps, checked against the models of its steps.

The inputs and outputs of a pipeline have the types and shapes that the models declare.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from modelport.gateway.backend_registry import PIPELINE
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.pipeline import pipeline_file
from modelport.gateway.backends.pipeline.constants import accepts, constant
from modelport.gateway.backends.pipeline.ensemble_check import (
    Node,
    check_batch,
    check_circle,
    check_same,
    find_model,
)
from modelport.gateway.backends.pipeline.graph import (
    OPERATORS,
    Condition,
    Constant,
    Graph,
    GraphStep,
    Sources,
    StepInput,
    check_streams,
)
from modelport.gateway.backends.pipeline.graph_backend import GraphBackend
from modelport.gateway.backends.pipeline.pipeline_file import (
    Alternatives,
    PipelineGraph,
    PipelineStep,
    StepCondition,
    Value,
    split,
)
from modelport.gateway.errors import Internal, InvalidArgument, suggestion
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.toml_tables import MAX_FILE_BYTES
from modelport.gateway.types import NUMPY_DTYPES, Datatype, dims_text

#: What a tensor may lack: nothing, or all rows of a request at once, or any of its rows.
_NOTHING, _ALL, _ANY = range(3)
#: By the value with which it is compared, the type of an input that no model takes.
_COMPARED = {
    bool: Datatype.BOOL,
    int: Datatype.INT64,
    float: Datatype.FP64,
    str: Datatype.BYTES,
}


def load(artifact: Artifact) -> GraphBackend:
    """Load a pipeline.

    Raises:
        Unavailable: the model of a step is not READY.
        InvalidArgument: the file is invalid, or contradicts the models.
        Internal: the loader runs outside of a gateway.
    """
    if artifact.host is None:
        raise Internal("a pipeline can only be loaded by a gateway")
    name, filename = artifact.model_name, artifact.config.default_model_filename
    try:
        content = untrusted_files.read_text(artifact.path / filename, MAX_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "") or "it is not UTF-8"
        raise InvalidArgument(f"'{filename}' cannot be read: {reason}") from error
    pipeline = pipeline_file.parse(content)
    config = _config(artifact.config, pipeline)
    steps = config.ensemble_scheduling.step
    models = {
        step.name: find_model(name, each, artifact.host.config_of, PIPELINE.format)
        for step, each in zip(pipeline.steps, steps, strict=True)
    }
    check_circle(name, config, artifact.host.config_of, PIPELINE.format)
    graph = _GraphBuilder(name, pipeline, models, config).build()
    check_streams(graph, pipeline.inputs, name)
    return GraphBackend(artifact, artifact.host, config, graph)


def _config(given: ModelConfig, pipeline: PipelineGraph) -> ModelConfig:
    """The configuration, with the steps as an ensemble has them: for other tools to see."""
    config = copy.deepcopy(given)
    config.max_batch_size = pipeline.max_batch_size
    config.ensemble_scheduling.max_inflight_requests = pipeline.max_inflight_requests
    for step in pipeline.steps:
        shown = config.ensemble_scheduling.step.add(
            model_name=step.model, model_version=step.version or -1
        )
        for theirs, alternatives in step.inputs.items():
            if isinstance(alternatives[0], str):
                shown.input_map[theirs] = alternatives[0]
        for tensor in pipeline.used[step.name]:
            shown.output_map[split(tensor)[1]] = tensor
    return config


class _GraphBuilder:
    """Builds the graph of the pipeline ``name``, and adds its tensors to ``config``."""

    def __init__(
        self,
        name: str,
        pipeline: PipelineGraph,
        models: Mapping[str, ModelConfig],
        config: ModelConfig,
    ) -> None:
        self._name, self._pipeline, self._models = name, pipeline, models
        self._config = config
        self._where = f"in pipeline '{name}'"
        self._batches = pipeline.max_batch_size > 0
        #: By tensor, as its maker declares it; an input of the pipeline as its takers do.
        self._nodes: dict[str, Node] = {}
        self._optional = self._omissible()
        self._lacks = {
            each: _ALL if each in self._optional else _NOTHING for each in pipeline.inputs
        }

    def build(self) -> Graph:
        steps = tuple(map(self._step, self._pipeline.steps))
        for step in self._pipeline.steps:
            for condition in step.conditions:
                self._check_condition(step.name, condition)
        for name in self._pipeline.inputs:
            node = self._nodes[name]
            self._declare(self._config.input.add(optional=name in self._optional), name, node)
        outputs = {name: self._output(name, each) for name, each in self._pipeline.outputs.items()}
        return Graph(PIPELINE.format, steps, outputs)

    def _omissible(self) -> frozenset[str]:
        """The inputs without which every step that takes them has another tensor, or none."""
        last = (alternatives[-1] for alternatives in self._pipeline.outputs.values())
        needed = {each for each in last if isinstance(each, str)}
        taken: set[str] = set()
        for step in self._pipeline.steps:
            optional = {each.name for each in self._models[step.name].input if each.optional}
            for theirs, alternatives in step.inputs.items():
                taken.update(each for each in alternatives if isinstance(each, str))
                if theirs not in optional and isinstance(alternatives[-1], str):
                    needed.add(alternatives[-1])
        return frozenset(each for each in self._pipeline.inputs if each in taken - needed)

    # -- steps ------------------------------------------------------------------------------------

    def _step(self, step: PipelineStep) -> GraphStep:
        model = self._models[step.name]
        where, batches = f"{self._where}, step '{step.name}'", model.max_batch_size > 0
        check_batch(f"pipeline '{self._name}'", self._config, step.model, model)
        decoupled = bool(model.model_transaction_policy.decoupled)
        if decoupled and step.skips:
            raise InvalidArgument(
                f"{where}: model '{step.model}' is decoupled, and responses that were sent cannot "
                "be taken back; remove on_failure"
            )
        inputs = self._inputs(where, step, model)
        lacks = max((self._lack(each.sources) for each in inputs if not each.optional), default=0)
        if step.conditions:
            lacks = _ANY if self._batches else _ALL
        if lacks is _ANY and not batches:
            raise InvalidArgument(
                f"{where}: it may run for some rows of a batch alone, and model '{step.model}' "
                "does not batch; remove max_batch_size, or give the model a max_batch_size"
            )
        outputs = self._step_outputs(where, step, model)
        self._lacks |= dict.fromkeys(
            (ours for _, ours in outputs), max(lacks, _ALL if step.skips else _NOTHING)
        )
        conditions = (
            Condition(*each._replace(value=_operand(each.value))) for each in step.conditions
        )
        return GraphStep(
            step.name, step.model, step.version, inputs, outputs, batches, decoupled,
            tuple(conditions), step.skips, step.timeout_seconds,
        )  # fmt: skip

    def _inputs(self, where: str, step: PipelineStep, model: ModelConfig) -> tuple[StepInput, ...]:
        declared = {tensor.name: tensor for tensor in model.input}
        for name in step.inputs:
            self._require(where, step.model, "input", name, declared)
        made = []
        for name, tensor in declared.items():
            if name not in step.inputs:
                if not tensor.optional:
                    raise InvalidArgument(
                        f"{where}: input '{name}' of model '{step.model}' is given no tensor; add "
                        f"'{name}' to inputs"
                    )
                continue
            node = _node(step.model, tensor, model)
            sources = self._sources(f"{where}, input '{name}'", step.inputs[name], node, node.dims)
            if tensor.optional and self._lack(sources) is _ANY:
                raise InvalidArgument(
                    f"{where}: input '{name}' may lack some rows of a batch; let its list end with "
                    "a { value = ... }"
                )
            made.append(StepInput(name, sources, len(node.full), bool(tensor.optional)))
        return tuple(made)

    def _step_outputs(
        self, where: str, step: PipelineStep, model: ModelConfig
    ) -> tuple[tuple[str, str], ...]:
        declared = {tensor.name: tensor for tensor in model.output}
        made = []
        for tensor in self._pipeline.used[step.name]:
            name = split(tensor)[1]
            self._require(where, step.model, "output", name, declared)
            self._nodes[tensor] = _node(step.model, declared[name], model)
            made.append((name, tensor))
        return tuple(made)

    def _require(
        self, where: str, model: str, kind: str, name: str, declared: Mapping[str, Any]
    ) -> None:
        if name not in declared:
            hint = suggestion(name, declared, "; ") or f"; it has {', '.join(declared)}"
            raise InvalidArgument(f"{where}: model '{model}' has no {kind} '{name}'{hint}")

    # -- tensors ----------------------------------------------------------------------------------

    def _sources(
        self, where: str, alternatives: Alternatives, node: Node, dims: tuple[int, ...]
    ) -> Sources:
        """The sources of what ``node`` declares, whose constants have ``dims``."""
        sources: list[str | Constant] = []
        for each in alternatives:
            if isinstance(each, Value):
                datatype = configuration.datatype(node.data_type, where)
                try:
                    data = constant(each.value, datatype, dims)
                except ValueError as error:
                    raise InvalidArgument(f"{where}: its value {error}") from None
                sources.append(Constant(datatype, data, self._batches and node.batched))
                continue
            sources.append(each)
            known = self._nodes.setdefault(each, node)
            check_same(f"{self._where}, tensor '{each}'", known, node)
            if each in self._pipeline.inputs and known.batched == node.batched:
                narrower = tuple(max(pair) for pair in zip(known.dims, node.dims, strict=True))
                self._nodes[each] = replace(known, dims=narrower)
        return tuple(sources)

    def _lack(self, sources: Sources) -> int:
        """The rows that the first available tensor of ``sources`` may lack."""
        lacks = [self._lacks[each] for each in sources if isinstance(each, str)]
        sure = len(lacks) < len(sources) or _NOTHING in lacks
        return _NOTHING if sure else max(lacks)

    def _own(self, node: Node) -> tuple[int, ...]:
        """The dims of a tensor of the pipeline, without its batch dimension."""
        if not self._batches:
            return node.full
        whole = not node.batched and len(node.dims) > 1 and node.dims[0] == -1
        return node.dims[1:] if whole else node.dims

    def _output(self, name: str, alternatives: Alternatives) -> Sources:
        where = f"{self._where}, output '{name}'"
        first = next(each for each in alternatives if isinstance(each, str) and split(each)[0])
        node = self._nodes[first]
        own = Node(self._name, node.data_type, self._own(node), self._batches)
        sources = self._sources(where, alternatives, own, own.dims)
        if self._lack(sources):
            raise InvalidArgument(
                f"{where}: there is none if '{first}' is skipped; let its list end with a "
                "{ value = ... }, or with a tensor that there always is"
            )
        self._declare(self._config.output.add(), name, own)
        return sources

    def _declare(self, tensor: Any, name: str, node: Node) -> None:
        dims = node.dims if node.model == self._name else self._own(node)
        tensor.name, tensor.data_type = name, node.data_type
        tensor.dims.extend(dims)

    def _check_condition(self, step: str, condition: StepCondition) -> None:
        where = f"{self._where}, step '{step}': the condition '{condition.text}'"
        tensor, kind = condition.tensor, type(condition.value)
        if tensor not in self._nodes:  # an input that no model takes
            number = configuration.data_type(_COMPARED[kind])
            self._nodes[tensor] = Node(tensor, number, (1,), self._batches)
        node = self._nodes[tensor]
        dims = node.dims if node.batched else self._own(node)
        if any(size != 1 for size in dims):
            raise InvalidArgument(
                f"{where} needs a single value, and '{tensor}' has shape {dims_text(node.full)}; "
                "let a step compute the value"
            )
        datatype = configuration.datatype(node.data_type, where)
        ordered = condition.operator not in ("==", "!=")
        if not accepts(datatype, kind) or (datatype is Datatype.BOOL and ordered):
            raise InvalidArgument(
                f"{where} compares '{tensor}', which is {datatype}, with {condition.value!r}"
            )
        try:
            if datatype is not Datatype.BYTES:
                with np.errstate(over="raise"):
                    zero = np.zeros(1, NUMPY_DTYPES[datatype])
                    OPERATORS[condition.operator](zero, condition.value)
        except (OverflowError, FloatingPointError):
            raise InvalidArgument(f"{where} has a number that does not fit {datatype}") from None


def _operand(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _node(model: str, tensor: Any, config: ModelConfig) -> Node:
    return Node(model, tensor.data_type, tuple(tensor.dims), config.max_batch_size > 0)
