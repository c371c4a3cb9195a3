"""An interpreter of ``torch.export`` programs that runs each operator with TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from modelport.exporters.lowering import weights
from modelport.exporters.lowering.datatypes import tf_dtype
from modelport.exporters.lowering.program import elsewhere
from modelport.exporters.lowering.registry import apply, name_of
from modelport.exporters.lowering.sizes import rank, static_shape
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.exporters.sources.torch_errors import origin
from modelport.gateway.errors import Unsupported, first_line

#: Largest result in bytes that is always computed at export if it depends on weights alone.
FOLDED_BYTES = 4096

#: Key of what was computed at export, in a node's ``meta``: TensorFlow may trace a function twice,
#: and refuses variables that are new the second time.
FOLDED = "modelport_folded"

SubGraph = Callable[..., list[Any]]


class Interpreter:
    """A program as a function of TensorFlow's tensors, which are its inputs in order.

    Attributes:
        program: a program with operators of the table alone.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self._constants = dict(_constants(program))

    def __call__(self, *inputs: Any) -> list[Any]:
        """The program's results, in order."""
        given = iter(inputs)
        signature = self.program.graph_signature
        values = [
            next(given) if spec.kind is InputKind.USER_INPUT else self._constants.get(spec.target)
            for spec in signature.input_specs
        ]
        results = _run(self.program.graph_module, values)
        return [
            value
            for value, spec in zip(results, signature.output_specs, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT
        ]


def _constants(program: ExportedProgram) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers and constants by name; tensors that share their values are one."""
    stored: Mapping[str, Any] = {**program.constants, **program.state_dict}
    seen: dict[Any, Any] = {}
    for spec in program.graph_signature.input_specs:
        tensor = stored.get(spec.target) if spec.target else None
        if isinstance(tensor, torch.Tensor):
            place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if not tensor.numel() or place not in seen:
                seen[place] = weights.constant_of(tensor)
            yield str(spec.target), seen[place]


def _run(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Run the nodes of ``module`` in order; a value is freed after its last use."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = _checked(node, next(given))
        elif node.op == "get_attr":
            values[node] = _attribute(module, str(node.target))
        elif node.op == "output":
            results = fx.node.map_arg(node.args[0], values.__getitem__)
            return list(results) if isinstance(results, tuple | list) else [results]
        else:
            values[node] = _compute(node, values)
    return []


def _attribute(module: fx.GraphModule, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    if isinstance(found, fx.GraphModule):
        return _sub_graph(found)
    if not isinstance(found, torch.Tensor):
        return found
    constants: dict[str, Any] = module.meta.setdefault(FOLDED, {})
    if path not in constants:
        constants[path] = weights.constant_of(found)
    return constants[path]


def _sub_graph(module: fx.GraphModule) -> SubGraph:
    """A branch, or the body of a loop, as a function of its arguments."""
    return lambda *arguments: _run(module, arguments)


def _compute(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args: Any = fx.node.map_arg(node.args, values.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, values.__getitem__)
    name = name_of(node.target)
    try:
        if (folded := _folded(node, name, args, kwargs)) is not None:
            return folded
        return _checked(node, apply(name, args, kwargs))
    except Unsupported as error:
        raise Unsupported(f"operator '{name}' of {origin(node)}: {error}") from error
    except Exception as error:
        raise Unsupported(
            f"operator '{name}' of {origin(node)} cannot be lowered to TensorFlow "
            f"({type(error).__name__}: {first_line(error)}); {elsewhere([node.target])}"
        ) from error


def _folded(node: fx.Node, name: str, args: Any, kwargs: Any) -> Any:
    """The result of constants alone, computed at export, unless the file would grow by it."""
    if tf.executing_eagerly() or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    tensors = [x for x in tf.nest.flatten([list(args), kwargs]) if tf.is_tensor(x)]
    if not tensors or not all(weights.is_constant(x) for x in tensors):
        return None
    if FOLDED not in node.meta:
        alone = all(len(each.users) == 1 for each in node.all_input_nodes)
        size = sum(x.dtype.size * x.shape.num_elements() for x in tensors)
        node.meta[FOLDED] = weights.fold(
            lambda: _checked(node, apply(name, args, kwargs)), max(FOLDED_BYTES, size * alone)
        )
    return node.meta[FOLDED]


def _checked(node: fx.Node, result: Any) -> Any:
    """``result`` with the static sizes that the program knows.

    Raises:
        ValueError: datatype or shape are not the program's.
    """
    expected = node.meta.get("val")
    if isinstance(expected, tuple | list) and isinstance(result, tuple | list):
        return [_conform(each, value) for each, value in zip(expected, result, strict=False)]
    return _conform(expected, result)


def _conform(expected: Any, result: Any) -> Any:
    if not isinstance(expected, torch.Tensor) or not tf.is_tensor(result):
        return result
    if result.dtype != tf_dtype(expected.dtype):
        raise ValueError(f"the result is {result.dtype.name} instead of {expected.dtype}")
    if rank(result) != expected.ndim:
        raise ValueError(f"the result has {rank(result)} dimensions instead of {expected.ndim}")
    known = static_shape(expected.shape)
    if not result.shape.is_compatible_with(known):
        raise ValueError(f"the result is {result.shape} instead of {tuple(expected.shape)}")
    if not result.shape.is_fully_defined():
        result.set_shape(known)
    return result
