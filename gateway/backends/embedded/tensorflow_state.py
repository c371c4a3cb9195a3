"""State of a SavedModel: the variables that its signatures write, with their first values.

The state of random generators is none here: one that started again with each request would not be
random.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops, gen_state_ops

from modelport.gateway.errors import Unsupported

v1 = tf.compat.v1

#: Operators that change variables or tables, which are among their inputs.
WRITERS = re.compile(
    r"Assign(Add|Sub)?(VariableOp)?|(Resource)?(CountUpTo|StridedSliceAssign)"
    r"|(Resource)?(Sparse)?Apply\w+|(Resource)?Scatter(Nd)?(Add|Div|Max|Min|Mul|Sub|Update)"
    r"|LookupTable(Insert|Remove|Import)(V2)?"
)
#: Operators that draw random numbers.
RANDOM = re.compile(
    r"Random(?!Index)\w+|Multinomial|(Parameterized)?TruncatedNormal|NonDeterministicInts"
    r"|Stateful(Standard|Truncated|Random|Uniform)\w*|Rng\w+|SampleDistorted\w+"
    r"|\w+CandidateSampler|\w*SeedGenerator"
)
_VARIABLES = frozenset({"VarHandleOp", "Variable", "VariableV2"})
#: Variables and tables of one run.
_LOCAL = re.compile(r"TemporaryVariable|Anonymous\w+")
#: Operators that pass on their first input.
_PASSES = frozenset({"Identity", "Enter", "RefEnter", "RefIdentity", "Switch", "RefSwitch"})
#: ``DT_RESOURCE``, and the first type of references.
_RESOURCE, _REFERENCE = 20, 101


class Variables:
    """The variables that signatures write; runs of all signatures take turns if there are any.

    Args:
        signatures: the fetched tensors of each signature.

    Raises:
        Unsupported: a signature writes to a table, or to a variable that cannot be found.
    """

    def __init__(
        self, graph: Any, session: Any, signatures: Mapping[str, Iterable[str]], file: str
    ) -> None:
        writers = _Writers(graph.as_graph_def(), file)
        self.written = {name: writers.written(name, each) for name, each in signatures.items()}
        names = sorted(set().union(*self.written.values()))
        self.names = ", ".join(names)
        self._lock, self._changed = threading.Lock(), False
        if names:
            with graph.as_default():
                operations = [graph.get_operation_by_name(name) for name in names]
                first = session.run([_read(operation) for operation in operations])
                fed = [v1.placeholder(value.dtype) for value in first]
                assigned = list(map(_assign, operations, fed))
            assign: Callable[..., Any] = session.make_callable(assigned, feed_list=fed)
            self._restore = partial(assign, *first)

    @contextlib.contextmanager
    def first_values(self, signature: str) -> Iterator[None]:
        """Run ``signature`` in this context, alone, with the first values of all variables."""
        with self._lock:
            if self._changed:
                self._restore()
            self._changed = bool(self.written[signature])
            yield

    def close(self) -> None:
        if self.names:
            del self._restore


def _read(operation: Any) -> Any:
    variable = operation.outputs[0]
    if operation.type != "VarHandleOp":
        return tf.identity(variable)
    return gen_resource_variable_ops.read_variable_op(variable, operation.get_attr("dtype"))


def _assign(operation: Any, value: Any) -> Any:
    variable = operation.outputs[0]
    if operation.type != "VarHandleOp":
        return gen_state_ops.assign(variable, value, validate_shape=False)
    return gen_resource_variable_ops.assign_variable_op(variable, value)


class _Writers:
    """Finds the variables that a graph writes, through the functions that it calls."""

    def __init__(self, graph: Any, file: str) -> None:
        self._file = file
        self._nodes = {node.name: node for node in graph.node}
        self._functions = {f.signature.name: f for f in graph.library.function}
        #: The arguments that a function writes to, by index, and its own variables by shared name.
        self._written: dict[str, set[int | bytes]] = {}
        self._shared = {
            node.attr["shared_name"].s: node.name for node in graph.node if node.op == "VarHandleOp"
        }

    def written(self, signature: str, tensors: Iterable[str]) -> set[str]:
        """The variables that a run writes which fetches ``tensors``."""
        found = set()
        try:
            for place in self._places(self._reached(tensors), self._nodes, {}):
                name = self._shared.get(place, "") if isinstance(place, bytes) else str(place)
                if not name or self._nodes[name].op not in _VARIABLES:
                    what = f"table '{name}'" if name else "an unknown variable"
                    raise Unsupported(
                        f"'{self._file}' keeps state between requests: signature '{signature}' "
                        f"writes to {what}; save the model without that, or with its state as an "
                        "input and an output"
                    )
                found.add(name)
        except RecursionError as error:
            raise Unsupported(f"functions of '{self._file}' call each other too deeply") from error
        return found

    def _reached(self, tensors: Iterable[str]) -> Iterator[Any]:
        waiting, seen = [_name(tensor) for tensor in tensors], set[str]()
        while waiting:
            name = waiting.pop()
            if name not in seen and name in self._nodes:
                seen.add(name)
                yield self._nodes[name]
                waiting += map(_name, self._nodes[name].input)

    def _places(
        self, run: Iterable[Any], nodes: Mapping[str, Any], arguments: Mapping[str, int]
    ) -> Iterator[str | int | bytes]:
        """Yield the targets of writes: nodes, arguments by index, variables by shared name."""
        for node in run:
            inputs = [name for name in node.input if not name.startswith("^")]
            if WRITERS.fullmatch(node.op):
                places = [self._place(name, nodes, arguments) for name in inputs]
                known = [place for place in places if place is not None]
                yield from filter(lambda place: place != "", known or [b""])
            for called in _called(node):
                if called in self._functions:
                    count = len(self._functions[called].signature.input_arg)
                    for place in self._written_by(called):
                        if isinstance(place, bytes):
                            yield place
                        elif place - count + len(inputs) >= 0:  # the condition comes first
                            name = inputs[place - count]
                            found = self._place(name, nodes, arguments)
                            yield b"" if found is None else found

    def _place(
        self, name: str, nodes: Mapping[str, Any], arguments: Mapping[str, int]
    ) -> str | int | bytes | None:
        """The variable, table or argument that ``name`` refers to.

        None if it is a value, empty if the variable ends with the run.
        """
        name, seen = _name(name), set[str]()
        while name in nodes and nodes[name].op in _PASSES and name not in seen:
            seen.add(name)
            name = _name(nodes[name].input[0])
        if name in arguments:
            return arguments[name]
        node = nodes.get(name)
        if node is not None and _LOCAL.fullmatch(node.op):
            return ""
        if node is None or not (node.op in _VARIABLES or "Table" in node.op):
            return None
        return name if nodes is self._nodes else bytes(node.attr["shared_name"].s)

    def _written_by(self, function: str) -> set[int | bytes]:
        if function not in self._written:
            self._written[function] = set()  # for functions that call themselves
            body = self._functions[function]
            arguments = {
                argument.name: index
                for index, argument in enumerate(body.signature.input_arg)
                if argument.type == _RESOURCE or argument.type >= _REFERENCE
            }
            nodes = {node.name: node for node in body.node_def}
            places = self._places(nodes.values(), nodes, arguments)
            self._written[function] = {p for p in places if not isinstance(p, str)}
        return self._written[function]


def _called(node: Any) -> Iterator[str]:
    """The functions that ``node`` may call."""
    yield node.op
    for value in node.attr.values():
        yield value.func.name
        yield from (function.name for function in value.list.func)


def _name(tensor: str) -> str:
    return tensor.removeprefix("^").partition(":")[0]
