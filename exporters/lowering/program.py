"""The program of a module in operators of the table: exported by PyTorch, decomposed, checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch.export import ExportedProgram
from torch.onnx._internal.exporter._registration import ONNXRegistry

from modelport.exporters.decompositions import BUILT_IN, DECOMPOSITIONS
from modelport.exporters.decompositions.complex_parts import with_parts, without_pairs
from modelport.exporters.lowering.built_in import only_built_in
from modelport.exporters.lowering.operators import OPERATORS
from modelport.exporters.lowering.registry import name_of
from modelport.exporters.lowering.simplification import simplify
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import torch_errors
from modelport.gateway.errors import Unsupported

#: Checks of sizes and values; the gateway checks requests before they reach the model.
ASSERTIONS = frozenset(
    (
        "_assert_async",
        "_assert_async.msg",
        "_assert_scalar",
        "_assert_tensor_metadata",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    )
)


#: Operators that TFLite has no kernel for; TensorFlow has.
NOT_BUILT_IN = frozenset(("erfinv", "lgamma", "stft"))
#: Operators of the table that are decomposed where a number, such as that of groups, is open.
OF_KNOWN_NUMBERS = frozenset(("convolution",))


def prepared(traced: ExportedProgram) -> ExportedProgram:
    """``traced`` decomposed, without checks, and with views of views made simpler."""
    program: ExportedProgram = traced.run_decompositions(decompositions())
    for graph in graphs(program):
        _drop_assertions(graph)
        without_pairs(graph)
        for node in graph.nodes:
            if node.op == "call_function" and name_of(node.target) in ("view", "_unsafe_view"):
                x, wanted = node.args
                known = node.meta["val"].shape
                sizes = [k if isinstance(k, int) else w for k, w in zip(known, wanted, strict=True)]
                node.args = (x, sizes)
        simplify(graph)
    return program


def decompositions() -> Any:
    """PyTorch's decompositions and the project's own, except of what the table has whole."""
    table: Any = torch.export.default_decompositions()
    for operator, function in decomposition_table.items():
        if hasattr(operator, "_schema") and operator not in table:
            table[operator] = function
    table.update(DECOMPOSITIONS)
    for operator in list(table):
        name = name_of(operator)
        kept = name in OF_KNOWN_NUMBERS or (only_built_in() and name in NOT_BUILT_IN)
        if name in OPERATORS and not kept:
            del table[operator]
    if only_built_in():
        table = with_parts({**table, **BUILT_IN})
    return table


def graphs(program: ExportedProgram) -> Iterator[fx.Graph]:
    """The graph of ``program`` and those of its branches and loops."""
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield module.graph


def _drop_assertions(graph: fx.Graph) -> None:
    """Remove checks, and the arithmetic that served them alone."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and name_of(node.target) in ASSERTIONS:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def check_operators(program: ExportedProgram) -> None:
    """Raise ``Unsupported`` if the table lacks an operator of ``program``."""
    missing: dict[str, fx.Node] = {}
    for graph in graphs(program):
        for node in graph.nodes:
            if node.op == "call_function" and name_of(node.target) not in OPERATORS:
                missing.setdefault(name_of(_original(node)), node)
    if missing:
        name, node = next(iter(missing.items()))
        others = f" (and {', '.join(list(missing)[1:])})" if len(missing) > 1 else ""
        raise Unsupported(
            f"operator '{name}'{others} of {torch_errors.origin(node)} has no equivalent in "
            f"TensorFlow; {elsewhere(map(_original, missing.values()))}"
        )


def _original(node: fx.Node) -> Any:
    """The operator that a decomposition has made ``node`` of."""
    return node.meta.get("original_aten") or node.target


def elsewhere(operators: Iterable[Any]) -> str:
    """The formats that have all ``operators``, as a remedy."""
    with quiet():  # it reports operators of libraries that are not installed
        registry = ONNXRegistry.from_torchlib()
    in_onnx = all(registry.is_registered(each) for each in operators)
    return f"use --format torchscript{', pt2 or onnx' if in_onnx else ' or pt2'}"
