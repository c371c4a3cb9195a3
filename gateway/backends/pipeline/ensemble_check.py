"""Validation of an ensemble: its graph and the models of its steps, with Triton's messages.

Pipelines share what concerns the models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from modelport.gateway.errors import InvalidArgument, NotFound, Unavailable
from modelport.gateway.repository.config import ENSEMBLE, ModelConfig
from modelport.gateway.types import dims_text
from modelport.gateway.wire.proto import model_config_pb2 as pb

ConfigOf = Callable[[str, int], ModelConfig]


@dataclass(frozen=True, slots=True)
class Node:
    """A tensor of the graph as one model, or the graph itself, declares it."""

    model: str
    data_type: int
    dims: tuple[int, ...]
    batched: bool

    @property
    def full(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batched else self.dims


def check(name: str, config: ModelConfig, config_of: ConfigOf) -> list[ModelConfig]:
    """The configurations of the steps' models, if the ensemble is valid.

    Raises:
        InvalidArgument: the steps are not a graph from the inputs to the outputs, or contradict
            their models.
        Unavailable: the model of a step is not READY.
    """
    check_graph(name, config)
    models = [find_model(name, step, config_of) for step in config.ensemble_scheduling.step]
    check_circle(name, config, config_of)
    batched = config.max_batch_size > 0
    tensors = {
        t.name: Node(name, t.data_type, _own_dims(t), batched)
        for t in (*config.input, *config.output)
    }
    for step, model in zip(config.ensemble_scheduling.step, models, strict=True):
        check_batch(f"ensemble '{name}'", config, step.model_name, model)
        _check_step(name, step, model, tensors)
    return models


# -- the graph ------------------------------------------------------------------------------------


def check_graph(name: str, config: ModelConfig) -> None:
    """Require that every tensor is written once, reachable from the inputs, and used.

    Raises:
        InvalidArgument: a tensor is not.
    """
    steps = config.ensemble_scheduling.step
    if not steps:
        raise InvalidArgument(f"must specify 'step' for ensemble '{name}'")
    for kind, declared in (("input", config.input), ("output", config.output)):
        if not declared:
            raise InvalidArgument(f"must specify '{kind}' for ensemble '{name}'")
    made: set[str] = {tensor.name for tensor in config.input}
    for index, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                raise InvalidArgument(
                    f"must specify '{field}' in step {index} of ensemble '{name}'"
                )
        for ours in step.output_map.values():
            if ours in made:
                raise InvalidArgument(
                    f"ensemble tensor '{ours}' can appear in an output map only once for ensemble "
                    f"'{name}' step {index}"
                )
            made.add(ours)
    _check_flow(name, config, steps)


def _check_flow(name: str, config: ModelConfig, steps: Sequence[Any]) -> None:
    used = {ours for step in steps for ours in step.input_map.values()}
    for tensor in config.input:
        if tensor.name not in used:
            raise InvalidArgument(
                f"ensemble input '{tensor.name}' for ensemble '{name}' is not used"
            )
    ready = {tensor.name for tensor in config.input}
    for index in in_order(config):
        ready.update(steps[index].output_map.values())
    outputs = {tensor.name for tensor in config.output}
    for output in config.output:
        if output.name not in ready:
            raise InvalidArgument(f"output '{output.name}' for ensemble '{name}' is not written")
    for ours in sorted({o for step in steps for o in step.output_map.values()} | used):
        if ours not in ready or (ours not in used and ours not in outputs):
            raise InvalidArgument(f"ensemble tensor '{ours}' is unused in ensemble '{name}'")


def in_order(config: ModelConfig) -> Iterator[int]:
    """The steps that can run, each behind those that make its inputs, in linear time."""
    takers: dict[str, list[int]] = {}
    missing = []
    for index, step in enumerate(config.ensemble_scheduling.step):
        wanted = set(step.input_map.values())
        missing.append(len(wanted))
        for ours in wanted:
            takers.setdefault(ours, []).append(index)
    made = [tensor.name for tensor in config.input]
    while made:
        for index in takers.pop(made.pop(), ()):
            missing[index] -= 1
            if not missing[index]:
                yield index
                made += config.ensemble_scheduling.step[index].output_map.values()


# -- the models -----------------------------------------------------------------------------------


def find_model(name: str, step: Any, config_of: ConfigOf, kind: str = ENSEMBLE) -> ModelConfig:
    """The configuration of a step's model.

    Args:
        kind: the word for the graph.

    Raises:
        InvalidArgument: it is the graph itself.
        Unavailable: it is not READY.
    """
    if step.model_name == name:
        raise InvalidArgument(f"circular dependency between {kind}s: {name} -> {name}")
    version = max(0, step.model_version)
    try:
        return config_of(step.model_name, version)
    except (NotFound, Unavailable) as error:
        lacks = f"whose required version {version} is not" if version else "which has no version"
        raise Unavailable(
            f"{kind} '{name}' depends on '{step.model_name}' {lacks} loaded"
        ) from error


def check_circle(name: str, config: ModelConfig, config_of: ConfigOf, kind: str = ENSEMBLE) -> None:
    """Refuse a graph that contains itself, through an older version that still serves."""
    seen: set[str] = set()

    def visit(config: ModelConfig, way: tuple[str, ...]) -> None:
        for step in config.ensemble_scheduling.step:
            below = (*way, step.model_name)
            if step.model_name == name:
                raise InvalidArgument(f"circular dependency between {kind}s: {' -> '.join(below)}")
            if step.model_name not in seen:
                seen.add(step.model_name)
                visit(find_model(name, step, config_of, kind), below)

    visit(config, (name,))


def check_batch(where: str, config: ModelConfig, name: str, model: ModelConfig) -> None:
    """Refuse a model ``name`` that takes smaller batches than the graph."""
    if 0 < model.max_batch_size < config.max_batch_size:
        raise InvalidArgument(
            f"{where} allows maximum batch size {config.max_batch_size}, but it contains model "
            f"'{name}' which only allows maximum batch size to be {model.max_batch_size}"
        )


def _check_step(name: str, step: Any, model: ModelConfig, tensors: dict[str, Node]) -> None:
    where, batched = f"in ensemble '{name}'", model.max_batch_size > 0
    inputs = {tensor.name: tensor for tensor in model.input}
    outputs = {tensor.name: tensor for tensor in model.output}
    for theirs, ours in sorted(step.input_map.items()):
        if theirs not in inputs:
            raise InvalidArgument(
                f"{where}, ensemble tensor '{ours}' is mapping to non-existing input '{theirs}' in "
                f"model '{step.model_name}'"
            )
    for tensor in model.input:
        if tensor.name not in step.input_map and not tensor.optional:
            raise InvalidArgument(
                f"{where}, input '{tensor.name}' in model '{step.model_name}' is not mapped to any "
                "ensemble tensors"
            )
    for theirs, ours in sorted(step.output_map.items()):
        if theirs not in outputs:
            raise InvalidArgument(
                f"{where}, ensemble tensor '{ours}' is mapped from non-existing output '{theirs}' "
                f"in model '{step.model_name}'"
            )
    for known, mapping in ((inputs, step.input_map), (outputs, step.output_map)):
        for theirs, ours in sorted(mapping.items()):
            tensor = known[theirs]
            node = Node(step.model_name, tensor.data_type, tuple(tensor.dims), batched)
            check_same(f"{where}, ensemble tensor '{ours}'", tensors.setdefault(ours, node), node)


def _own_dims(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)


def check_same(where: str, one: Node, other: Node) -> None:
    """Refuse a tensor that two models declare with different types or shapes."""
    if one.data_type != other.data_type:
        raise InvalidArgument(
            f"{where}: inconsistent data type: {pb.DataType.Name(one.data_type)} is inferred from "
            f"model '{one.model}' while {pb.DataType.Name(other.data_type)} is inferred from model "
            f"'{other.model}'"
        )
    apart = one.batched != other.batched  # a batch dimension of 1 is added or removed at run time
    if not _fits(one.full, other.full) and not (apart and _fits(one.dims, other.dims)):
        raise InvalidArgument(
            f"{where}: inconsistent shape: {dims_text(one.full)} is inferred from model "
            f"'{one.model}' while {dims_text(other.full)} is inferred from model '{other.model}'"
        )


def _fits(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the dims agree; the batch counts as a dim, as some models may not batch."""
    return len(one) == len(other) and all(
        -1 in (a, b) or a == b for a, b in zip(one, other, strict=True)
    )
