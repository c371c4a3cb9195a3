"""Casts around nodes whose datatype the kernels of ONNX Runtime on the CPU lack.

ONNX defines ``Clip``, ``Max`` or ``Ceil`` of more datatypes than ONNX Runtime computes. Such a node
computes in a datatype that holds all values of the one that it lacks.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import onnx
import onnx_ir as ir
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

Supported = Mapping[str, frozenset[ir.DataType]]

#: Datatypes that hold all values of another one, as far as ONNX Runtime adds and compares them.
_HOLDS: Mapping[ir.DataType, tuple[ir.DataType, ...]] = {
    ir.DataType.BOOL: (ir.DataType.INT32, ir.DataType.INT64),
    ir.DataType.UINT8: (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT),
    ir.DataType.INT8: (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT),
    ir.DataType.INT16: (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT),
    ir.DataType.INT32: (ir.DataType.INT64, ir.DataType.DOUBLE),
    ir.DataType.INT64: (ir.DataType.DOUBLE,),  # up to 2**53
    # ONNX Runtime casts nodes of float16 by itself.
    ir.DataType.BFLOAT16: (ir.DataType.FLOAT,),
}
_HALVES = frozenset((ir.DataType.FLOAT16, ir.DataType.BFLOAT16))


#: Operators that leave integers as they are, though ONNX defines them of floats alone.
_ROUNDINGS = ("Ceil", "Floor", "Round")


def cast_around_gaps(model: ir.Model) -> None:
    """Let each node compute in a datatype that it has a kernel for, if there is one."""
    version = model.opset_imports.get("", 0)
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            if node.domain == "" and onnx.defs.has(node.op_type, version):
                for kind, wanted in _replacements(node, version).items():
                    _recast(graph, node, _formal(node, version), kind, wanted)


def _replacements(node: ir.Node, version: int) -> dict[str, ir.DataType]:
    """The datatypes that ``node`` should compute in, by the type variable of its schema."""
    if mixed := _mixed(node, version):
        return mixed
    kernels = _kernels(version).get(node.op_type, [])
    actual = {k: v.dtype for k, v in _formal(node, version) if v.dtype is not None}
    if not kernels or any(_fits(kernel, actual) for kernel in kernels):
        return {}
    for dtype in dict.fromkeys(actual.values()):
        if not (dtype == ir.DataType.BOOL or node.op_type in _ROUNDINGS or _defined(node, version)):
            continue  # as of a function of floats, whose result is no integer
        kinds = [kind for kind, each in actual.items() if each == dtype]
        for other in _HOLDS.get(dtype, ()):
            for chosen in (*([kind] for kind in kinds), kinds):
                wanted = dict.fromkeys(chosen, other)
                if any(_fits(kernel, {**actual, **wanted}) for kernel in kernels):
                    return wanted
    return {}


def _mixed(node: ir.Node, version: int) -> dict[str, ir.DataType]:
    """The type variables of halves and floats beside each other, as PyTorch's normalisations of
    half precision by weights in full precision have."""
    given: dict[str, set[ir.DataType]] = defaultdict(set)
    for kind, value in _formal(node, version):
        if value.dtype is not None and kind.startswith("T"):
            given[kind].add(value.dtype)
    wide = ir.DataType.FLOAT
    return {
        kind: wide
        for kind, several in given.items()
        if len(several) > 1 and several - _HALVES == {wide}
    }


def _defined(node: ir.Node, version: int) -> bool:
    """Whether ONNX defines the operator of the datatypes that ``node`` has."""
    schema = onnx.defs.get_schema(node.op_type, version, "")
    allowed = {
        c.type_param_str: frozenset(_datatypes(c.allowed_type_strs))
        for c in schema.type_constraints
    }
    return _fits(allowed, {k: v.dtype for k, v in _formal(node, version) if v.dtype is not None})


def _fits(kernel: Supported, actual: Mapping[str, ir.DataType]) -> bool:
    return all(dtype in kernel.get(kind, (dtype,)) for kind, dtype in actual.items())


@functools.cache
def _kernels(version: int) -> dict[str, list[Supported]]:
    """The type constraints of every kernel, by operator."""
    found: dict[str, list[Supported]] = defaultdict(list)
    for kernel in getattr(runtime, "get_all_opkernel_def", list)():
        first, last = kernel.version_range
        on_cpu = kernel.provider == "CPUExecutionProvider" and not kernel.domain
        if on_cpu and first <= version <= last:
            constraints = kernel.type_constraints.items()
            found[kernel.op_name].append({k: frozenset(_datatypes(v)) for k, v in constraints})
    return found


def _datatypes(names: Iterable[str]) -> Iterator[ir.DataType]:
    for name in names:
        word = name.removeprefix("tensor(").removesuffix(")").upper()
        if word in ir.DataType.__members__:
            yield ir.DataType[word]


def _formal(node: ir.Node, version: int) -> list[tuple[str, ir.Value]]:
    """The values of ``node``, each with the type variable of its parameter."""
    schema = onnx.defs.get_schema(node.op_type, version, "")
    pairs: list[tuple[str, ir.Value]] = []
    for parameters, values in ((schema.inputs, node.inputs), (schema.outputs, node.outputs)):
        for place, value in enumerate(values):
            if value is not None and parameters:
                pairs.append((parameters[min(place, len(parameters) - 1)].type_str, value))
    return pairs


def _recast(
    graph: ir.Graph,
    node: ir.Node,
    formal: list[tuple[str, ir.Value]],
    kind: str,
    wanted: ir.DataType,
) -> None:
    """Cast the inputs of type ``kind`` to ``wanted``, and the outputs back."""
    chosen = {id(value) for name, value in formal if name == kind}
    own = next(value.dtype for name, value in formal if name == kind and value.dtype is not None)
    for place, value in enumerate(node.inputs):
        if value is not None and id(value) in chosen:
            cast = _cast(value, wanted)
            graph.insert_before(node, cast)
            node.replace_input_with(place, cast.outputs[0])
    for output in node.outputs:
        if id(output) in chosen:
            back = _cast(output, own)
            graph.insert_after(node, back)
            ir.convenience.replace_all_uses_with(
                output, back.outputs[0], replace_graph_outputs=True
            )
            back.replace_input_with(0, output)
            output.dtype = wanted


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    node = ir.node("Cast", [value], {"to": dtype})
    node.outputs[0].dtype, node.outputs[0].shape = dtype, value.shape
    return node
