"""``pipeline.toml``: a graph of steps; each step is a request to a model.

    inputs = ["image", "language"]
    max_batch_size = 8                      # 0, the default: tensors have the models' full shapes

    [outputs]
    text = ["read.text", { value = "" }]    # the first that there is; a constant comes last

    [steps.detect]
    model = "detector"
    inputs = { pixels = "image", threshold = { value = 0.5 } }

    [steps.read]
    model = "recogniser"
    version = 3
    inputs = { crop = "detect.crop", language = ["language", { value = "en" }] }
    condition = "detect.score > 0.5"        # or a list; all must hold
    on_failure = "skip"
    timeout_seconds = 0.2

A tensor is named by an input, or by a step and one of its model's outputs. This module checks the
graph by itself; ``pipeline`` checks it against the models.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple, TypeVar

from modelport.gateway.errors import InvalidArgument, first_line, suggestion
from modelport.gateway.toml_tables import (
    MAX_FILE_BYTES,
    InvalidKey,
    InvalidValue,
    count,
    number,
    one_of,
    read_by,
    read_table,
    text,
)

T = TypeVar("T")
#: The document's own name in messages.
FILE = "pipeline.toml"
MAX_SECONDS = 86_400
_STEP_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_CONDITION = re.compile(r"(not\s+)?([^\s=!<>]+)\s*(?:(==|!=|<=|>=|<|>)\s*(.+))?\Z")
_SKIP = "skip"


class Value(NamedTuple):
    """A constant, as the file has it: a number, a string, a boolean, or nested lists of them."""

    value: Any


#: The name of a tensor, or a constant.
Alternative = str | Value
#: The first that there is.
Alternatives = tuple[Alternative, ...]


class StepCondition(NamedTuple):
    """A condition: ``tensor operator value``."""

    text: str
    tensor: str
    operator: str
    value: Any


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """A step. Its ``inputs`` are by the model's names; ``skips``: a failure skips it."""

    name: str
    model: str
    version: int
    inputs: Mapping[str, Alternatives]
    conditions: tuple[StepCondition, ...]
    skips: bool
    timeout_seconds: float | None

    @property
    def tensors(self) -> list[str]:
        """The tensors that it takes, or that its conditions read."""
        taken = tensors_of(self.inputs)
        return [*taken, *(condition.tensor for condition in self.conditions)]


class PipelineGraph(NamedTuple):
    """The content of the file.

    Attributes:
        steps: each stands behind those that it depends on.
        used: for each step, the tensors that others take or read.
    """

    inputs: tuple[str, ...]
    outputs: Mapping[str, Alternatives]
    steps: tuple[PipelineStep, ...]
    used: Mapping[str, Sequence[str]]
    max_batch_size: int
    max_inflight_requests: int


def tensors_of(sources: Mapping[str, Alternatives]) -> Iterator[str]:
    """The tensors among ``sources``."""
    for alternatives in sources.values():
        yield from (each for each in alternatives if isinstance(each, str))


def split(tensor: str) -> tuple[str, str]:
    """The step and the output of a tensor; an input of the pipeline has no step."""
    step, dot, output = tensor.partition(".")
    return (step, output) if dot else ("", tensor)


# -- the tables -----------------------------------------------------------------------------------


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(n, str) and n for n in value):
        raise InvalidValue("a list of names, such as ['image']")
    return tuple(value)


def _alternatives(value: Any) -> Alternatives:
    found: list[Alternative] = []
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict) and each.keys() == {"value"}:
            found.append(Value(each["value"]))
        elif isinstance(each, str) and each:
            found.append(each)
        else:
            raise InvalidValue("a tensor as 'STEP.OUTPUT', { value = ... }, or a list of them")
    if not found or any(isinstance(each, Value) for each in found[:-1]):
        raise InvalidValue("a list of tensors; a { value = ... } may only be the last one")
    return tuple(found)


def _sources(value: Any) -> dict[str, Alternatives]:
    if not isinstance(value, dict) or not value:
        raise InvalidValue("a table of tensors, such as { x = 'STEP.OUTPUT' }")
    found = {}
    for key, each in value.items():
        try:
            found[key] = _alternatives(each)
        except InvalidValue as error:
            raise InvalidValue(f"a table in which '{key}' is {error}") from None
    return found


def _conditions(value: Any) -> tuple[StepCondition, ...]:
    texts = value if isinstance(value, list) and value else [value]
    return tuple(map(_condition, texts))


def _condition(value: Any) -> StepCondition:
    wanted = InvalidValue(
        "'TENSOR', 'not TENSOR', or 'TENSOR > 0.5' with ==, !=, <, <=, > or >= and a number, true, "
        "false or a quoted string, or a list of these"
    )
    match = _CONDITION.match(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise wanted
    negated, tensor, operator, operand = match.groups()
    if operator is None:
        return StepCondition(value, tensor, "==", not negated)
    try:
        parsed = tomllib.loads(f"value = {operand}")["value"]
    except (ValueError, RecursionError):
        raise wanted from None
    if negated or not isinstance(parsed, bool | int | float | str):
        raise wanted
    return StepCondition(value, tensor, operator, parsed)


def _steps(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(step, dict) for step in value.values()):
        raise InvalidValue("tables: write [steps.NAME] above the keys of each step")
    return value


@dataclass(frozen=True)
class _PipelineTable:
    inputs: tuple[str, ...] = field(metadata=read_by(_names))
    outputs: dict[str, Alternatives] = field(metadata=read_by(_sources))
    steps: dict[str, Any] = field(metadata=read_by(_steps))
    max_batch_size: int = field(default=0, metadata=read_by(count(0, 2**31 - 1)))
    max_inflight_requests: int = field(default=0, metadata=read_by(count(0, 2**32 - 1)))


@dataclass(frozen=True)
class _StepTable:
    model: str = field(metadata=read_by(text))
    inputs: dict[str, Alternatives] = field(metadata=read_by(_sources))
    version: int = field(default=0, metadata=read_by(count(1, 2**63 - 1)))
    condition: tuple[StepCondition, ...] = field(default=(), metadata=read_by(_conditions))
    on_failure: str = field(default="fail", metadata=read_by(one_of(("fail", _SKIP))))
    timeout_seconds: float | None = field(
        default=None, metadata=read_by(number(0, MAX_SECONDS, open_end=True))
    )


def _read(name: str, kind: type[T], table: Mapping[str, Any]) -> T:
    keys = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    try:
        for key, each in keys.items():
            if each.default is each.default_factory and key not in table:
                unknown = next((other for other in table if other not in keys), None)
                if unknown is None:
                    raise InvalidArgument(f"{FILE}: [{name}] needs the key '{key}'")
        read: T = read_table(name, kind, table)
    except InvalidKey as error:
        hint = "" if error.key in keys else suggestion(error.key, keys, "; ")
        raise InvalidArgument(f"{FILE}: {error}{hint}") from None
    return read


def parse(content: str) -> PipelineGraph:
    """Parse a ``pipeline.toml``.

    Raises:
        InvalidArgument: it is not TOML, or not a graph from its inputs to its outputs; the message
            names the step.
    """
    if len(content) > MAX_FILE_BYTES:
        raise InvalidArgument(f"{FILE} is larger than {MAX_FILE_BYTES} bytes")
    try:
        document = tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{FILE} is not TOML: {first_line(error)}") from error
    table = _read(FILE, _PipelineTable, document)
    steps = {name: _step(name, each) for name, each in table.steps.items()}
    _check_names(table.inputs)
    for name, step in steps.items():
        _check_references(f"step '{name}'", step.tensors, table.inputs, steps)
        if not any(tensors_of(step.inputs)):
            raise InvalidArgument(
                f"{FILE}: step '{name}' has only constants; give an input of its model a tensor"
            )
    for name, sources in table.outputs.items():
        taken = [each for each in sources if isinstance(each, str)]
        _check_references(f"output '{name}'", taken, table.inputs, steps)
        if not any(split(tensor)[0] for tensor in taken):
            raise InvalidArgument(f"{FILE}: output '{name}' is made by no step; name 'STEP.OUTPUT'")
    used = _used(table, steps)
    ordered = tuple(steps[name] for name in _in_order(steps))
    return PipelineGraph(
        table.inputs, table.outputs, ordered, used, table.max_batch_size,
        table.max_inflight_requests,
    )  # fmt: skip


def step_models(content: str) -> list[str]:
    """The models of the steps; empty if ``content`` is invalid, which loading it reports."""
    try:
        return [step.model for step in parse(content).steps]
    except InvalidArgument:
        return []


def _step(name: str, table: Mapping[str, Any]) -> PipelineStep:
    if not _STEP_NAME.match(name):
        raise InvalidArgument(
            f"{FILE}: step {name[:100]!r} needs a name of up to 64 letters, digits, '_' and '-'"
        )
    read = _read(f"steps.{name}", _StepTable, table)
    return PipelineStep(
        name, read.model, read.version, read.inputs, read.condition,
        read.on_failure == _SKIP, read.timeout_seconds,
    )  # fmt: skip


# -- the graph ------------------------------------------------------------------------------------


def _check_names(inputs: Sequence[str]) -> None:
    for name in inputs:
        if "." in name:
            raise InvalidArgument(f"{FILE}: input '{name}' may have no dot, as 'STEP.OUTPUT' has")
        if inputs.count(name) > 1:
            raise InvalidArgument(f"{FILE}: input '{name}' is listed twice")


def _check_references(
    where: str, tensors: Sequence[str], inputs: Sequence[str], steps: Mapping[str, PipelineStep]
) -> None:
    for tensor in tensors:
        step, output = split(tensor)
        if step or not output:
            if step not in steps:
                hint = suggestion(step, steps, "; ")
                raise InvalidArgument(f"{FILE}: {where} names the unknown step '{step}'{hint}")
            if not output:
                raise InvalidArgument(f"{FILE}: {where} names no output of the step in '{tensor}'")
        elif tensor in steps and tensor not in inputs:
            raise InvalidArgument(
                f"{FILE}: {where} takes the step '{tensor}'; name one of its outputs, as "
                f"'{tensor}.OUTPUT'"
            )
        elif tensor not in inputs:
            hint = suggestion(tensor, inputs, "; ")
            raise InvalidArgument(
                f"{FILE}: {where} takes '{tensor}', which is neither an input of the pipeline nor "
                f"'STEP.OUTPUT'{hint}"
            )


def _used(table: _PipelineTable, steps: Mapping[str, PipelineStep]) -> dict[str, list[str]]:
    """The tensors of each step that others use; every input and step has to be used."""
    read = dict.fromkeys(tensor for step in steps.values() for tensor in step.tensors)
    for name in table.inputs:
        if name not in read:
            raise InvalidArgument(f"{FILE}: input '{name}' is used by no step; remove it")
    used: dict[str, list[str]] = {name: [] for name in steps}
    for tensor in read | dict.fromkeys(tensors_of(table.outputs)):
        if maker := split(tensor)[0]:
            used[maker].append(tensor)
    for name, tensors in used.items():
        if not tensors:
            raise InvalidArgument(
                f"{FILE}: no step, condition or output uses an output of step '{name}'; remove it, "
                "or add its result to [outputs]"
            )
    return used


def _in_order(steps: Mapping[str, PipelineStep]) -> list[str]:
    """The steps, each behind those that it depends on."""
    before = {
        name: {made for made, _ in map(split, step.tensors) if made} for name, step in steps.items()
    }
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError as error:
        way = " -> ".join(error.args[1])
        raise InvalidArgument(
            f"{FILE}: the steps depend on each other in a circle: {way}"
        ) from None
