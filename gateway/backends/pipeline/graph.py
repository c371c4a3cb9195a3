"""The graph of steps that ensembles and pipelines share, and the tensors of a request on its way.

A step that is skipped has no outputs. In a graph that batches, each row of a request goes its own
way: a step runs for the rows for which its conditions hold. A graph that does not batch is one row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modelport.gateway.errors import Internal, InvalidArgument
from modelport.gateway.types import Array, Datatype, InferResponse, Tensor

#: Whether each row of a request has a tensor.
Rows = NDArray[np.bool_]

OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Constant(NamedTuple):
    """A constant tensor; ``per_row``: ``data`` is that of each row of the request."""

    datatype: Datatype
    data: Array
    per_row: bool

    def tensor(self, rows: int) -> Tensor:
        data = self.data
        if self.per_row:
            data = np.repeat(data[np.newaxis], rows, axis=0)
        return Tensor("", self.datatype, data)


#: The names of tensors, and a constant at the end: the first that there is.
Sources = tuple[str | Constant, ...]


class StepInput(NamedTuple):
    """An input of a step's model; without a tensor the step is skipped, unless it is ``optional``.

    Attributes:
        rank: of the model, with its batch dimension.
    """

    name: str
    sources: Sources
    rank: int
    optional: bool


class Condition(NamedTuple):
    """A condition on a tensor of one value, or of one value for each row."""

    text: str
    tensor: str
    operator: str
    value: Any

    def holds(self, state: RequestState) -> Rows:
        """The rows for which it holds; it does not hold where there is no tensor."""
        tensor, rows = state.tensors.get(self.tensor), state.rows.get(self.tensor)
        if tensor is None:
            return state.no_rows
        values = tensor.data.reshape(-1)
        if len(values) != state.count:
            raise Internal(
                f"the condition '{self.text}' needs a single value, and '{self.tensor}' has shape "
                f"{list(tensor.data.shape)}"
            )
        found: Rows = np.asarray(OPERATORS[self.operator](values, self.value), np.bool_)
        return found if rows is None else found & rows


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A step of a graph.

    Attributes:
        name: in errors.
        outputs: for each, the model's name and the graph's.
        batches: the model has a batch dimension.
        skips: a failure skips the step.
        needs: the tensors that it takes, or that its conditions read.
    """

    name: str
    model: str
    version: int
    inputs: tuple[StepInput, ...]
    outputs: tuple[tuple[str, str], ...]
    batches: bool
    decoupled: bool
    conditions: tuple[Condition, ...] = ()
    skips: bool = False
    timeout_seconds: float | None = None
    needs: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        sources = (source for each in self.inputs for source in each.sources)
        taken = [source for source in sources if isinstance(source, str)]
        needs = frozenset([*taken, *(condition.tensor for condition in self.conditions)])
        object.__setattr__(self, "needs", needs)


Steps = tuple[GraphStep, ...]


class Graph(NamedTuple):
    """Steps, and the sources of the outputs.

    Attributes:
        kind: the word in errors.
    """

    kind: str
    steps: Steps
    outputs: Mapping[str, Sources]


@dataclass(slots=True)
class RequestState:
    """The tensors of a request by the graph's names.

    Attributes:
        count: rows of the request; 1 in a graph that does not batch.
        rows: for tensors that some rows lack, those that have it. A tensor that is neither here nor
            in ``tensors`` has yet to come.
        behind: the response of each decoupled step so far.
    """

    count: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)
    behind: tuple[InferResponse, ...] = ()

    @property
    def no_rows(self) -> Rows:
        return np.zeros(self.count, np.bool_)

    def copy(self) -> RequestState:
        return RequestState(self.count, dict(self.tensors), dict(self.rows), self.behind)

    @property
    def final(self) -> bool:
        """Whether it is known that no decoupled step responds again."""
        return all(response.final for response in self.behind)

    def is_known(self, name: str) -> bool:
        """Whether the tensor has come, or never will."""
        return name in self.tensors or name in self.rows

    def is_ready(self, step: GraphStep) -> bool:
        """Whether it is known what the step gets."""
        return step.needs <= self.tensors.keys() or self._is_decided(step)

    def _is_decided(self, step: GraphStep) -> bool:
        """Whether tensors that are missing will never come, or are not needed."""
        return all(self._are_known(each.sources) for each in step.inputs) and all(
            self.is_known(condition.tensor) for condition in step.conditions
        )

    def _are_known(self, sources: Sources) -> bool:
        """Whether the first tensor of ``sources`` that all rows have is known, or all are."""
        for source in sources:
            if isinstance(source, Constant):
                return True
            if not self.is_known(source):
                return False
            if source not in self.rows:
                return True
        return True

    def resolve(self, sources: Sources) -> tuple[Tensor | None, Rows | None]:
        """The first tensor that there is, for each row, and the rows that have one (None: all)."""
        found, have = None, None
        for source in sources:
            if isinstance(source, Constant):
                tensor, rows = source.tensor(self.count), None
            elif source in self.tensors:
                tensor, rows = self.tensors[source], self.rows.get(source)
            else:
                continue
            if found is None or have is None:
                found, have = tensor, rows
            else:
                found, have = _merged(found, have, tensor, rows)
            if have is None:
                break
        return found, have

    def add(self, step: GraphStep, response: InferResponse, rows: Rows | None) -> None:
        """Take the outputs of a step that ran for ``rows``; its model may omit some.

        Those of a decoupled step may come with its next response.
        """
        if step.decoupled:
            self.behind += (response,)
        answers = {tensor.name: tensor for tensor in response.outputs}
        for theirs, ours in step.outputs:
            if theirs in answers:
                tensor = answers[theirs]
                data = tensor.data
                if rows is not None:
                    data = _scattered(data, rows, theirs)
                    self.rows[ours] = rows
                self.tensors[ours] = Tensor(ours, tensor.datatype, data)
            elif not step.decoupled:
                self.rows[ours] = self.no_rows

    def skip(self, step: GraphStep) -> None:
        """Go on without the step's outputs."""
        self.rows |= {ours: self.no_rows for _, ours in step.outputs}


def conjunction(one: Rows | None, other: Rows | None) -> Rows | None:
    """The rows that are in both; None is all rows."""
    if one is None or other is None:
        return one if other is None else other
    both: Rows = one & other
    return both


def _merged(
    first: Tensor, have: Rows, second: Tensor, rows: Rows | None
) -> tuple[Tensor, Rows | None]:
    """``first``, with the rows that it lacks from ``second``."""
    if first.data.shape != second.data.shape:
        raise InvalidArgument(
            f"rows with '{first.name}' have shape {list(first.data.shape[1:])} and others "
            f"{list(second.data.shape[1:])}, which cannot be one tensor; send them one by one"
        )
    lacking = ~have if rows is None else rows & ~have
    data = first.data.copy()
    data[lacking] = second.data[lacking]
    together: Rows = have | lacking
    return Tensor(first.name, first.datatype, data), None if together.all() else together


def gathered(tensor: Tensor, rows: Rows | None) -> Array:
    """The data of ``rows``."""
    if rows is None:
        return tensor.data
    if tensor.data.shape[:1] != rows.shape:
        raise Internal(
            f"'{tensor.name}' has shape {list(tensor.data.shape)} for a batch of {len(rows)}"
        )
    return tensor.data[rows]


def _scattered(data: Array, rows: Rows, name: str) -> Array:
    """``data`` of some rows, at their places among all rows."""
    count = np.count_nonzero(rows)
    if data.ndim == 0 or len(data) != count:
        raise Internal(f"output '{name}' has shape {list(data.shape)} for a batch of {count}")
    full = np.zeros((len(rows), *data.shape[1:]), data.dtype)
    full[rows] = data
    return full


def of_rank(data: Array, rank: int) -> Array:
    """``data`` with or without a batch dimension of 1, between models that batch and others."""
    shape = data.shape
    if len(shape) == rank - 1:
        return data.reshape(1, *shape)
    if len(shape) == rank + 1 and shape[0] == 1:
        return data.reshape(shape[1:])
    return data


def check_streams(graph: Graph, inputs: Sequence[str], name: str) -> None:
    """Require one chain of decoupled steps per tensor, because two have no common order.

    Each of the graph's steps stands behind those that make its inputs.

    Raises:
        InvalidArgument: a step or an output depends on two chains.
    """
    chains: dict[str, tuple[int, ...]] = dict.fromkeys(inputs, ())

    def longest(where: str, tensors: Iterable[str]) -> tuple[int, ...]:
        found = [chains[ours] for ours in tensors]
        most = max(found, key=len, default=())
        if any(chain != most[: len(chain)] for chain in found):
            raise InvalidArgument(
                f"in {graph.kind} '{name}', the {where} depends on several decoupled models, "
                "none of them behind the other"
            )
        return most

    for index, step in enumerate(graph.steps):
        chain = longest(f"step of model '{step.model}'", step.needs)
        chains |= dict.fromkeys(
            (ours for _, ours in step.outputs), (*chain, index) if step.decoupled else chain
        )
    wanted = (each for sources in graph.outputs.values() for each in sources)
    longest("output", (each for each in wanted if isinstance(each, str)))
