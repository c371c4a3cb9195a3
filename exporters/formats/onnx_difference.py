"""The operator at which an ONNX file and the module that it was made from part.

torch.onnx names values after the nodes of the exported program. Both compute all of them for one
batch, and the first that differs is where they part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from modelport.exporters.formats.onnx_session import OnnxParitySession
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.temporary_folder import temporary_folder
from modelport.gateway.types import Array, ModelSignature

#: Rounding of a value inside a model, relative to the largest value beside it.
ROUNDING = 1e-3

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARY = "/site-packages/"


def find(
    program: ExportedProgram, path: Path, signature: ModelSignature, inputs: Mapping[str, Array]
) -> str:
    """Describe the first operator whose values differ; empty if none does.

    Args:
        program: the program that the file at ``path`` was made from.
    """
    ours = _values_of(path, {node.name for node in program.graph.nodes}, inputs)
    tensors = [torch.tensor(inputs[spec.name]) for spec in signature.inputs]
    watcher = _Watcher(program, ours)
    with quiet(), torch.no_grad():
        watcher.run(*_arguments(program, tensors))
    return "" if watcher.found is None else _describe(watcher.found)


def _values_of(path: Path, names: set[str], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run the file with all values of ``names`` as outputs."""
    model = onnx_ir.load(path)
    given = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    for node in list(model.graph):
        model.graph.outputs.extend(
            value
            for value in node.outputs
            if value.name in names - given and value.type is not None
        )
    with temporary_folder() as folder:
        copy = folder / path.name
        onnx_ir.save(model, copy, external_data=f"{copy.name}.data")
        return OnnxParitySession(copy)(inputs)


def _arguments(program: ExportedProgram, tensors: list[Tensor]) -> list[Any]:
    """The arguments of the program's graph, which takes weights and constants, too."""
    left = iter(tensors)
    weights = {**program.state_dict, **program.constants}
    return [
        next(left) if spec.kind is InputKind.USER_INPUT else weights[spec.target]
        for spec in program.graph_signature.input_specs
        if spec.kind is not InputKind.TOKEN and (spec.target or spec.kind is InputKind.USER_INPUT)
    ]


class _Watcher(fx.Interpreter):
    """Runs a program until a value differs from the one of the same name in ``ours``."""

    def __init__(self, program: ExportedProgram, ours: Mapping[str, Array]) -> None:
        super().__init__(program.graph_module)
        self.found: fx.Node | None = None
        self._ours = ours

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        ours = self._ours.get(n.name) if n.op == "call_function" else None
        if self.found is None and ours is not None and isinstance(value, Tensor):
            self.found = n if _differs(value.numpy(), ours) else None
        return value


def _differs(theirs: Array, ours: Array) -> bool:
    if theirs.shape != ours.shape:
        return True
    if theirs.dtype.kind != "f":
        return bool((theirs != ours).any())
    with np.errstate(all="ignore"):
        error = np.abs(theirs.astype(np.float64) - ours)
        largest = np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)
    same = (theirs == ours) | (np.isnan(theirs) & np.isnan(ours))
    return bool((~same & ~(error <= ROUNDING * largest)).any())


def _describe(node: fx.Node) -> str:
    """The operator, its module, and the line of code that calls it."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    where = ""
    if stack and stack[-1][0]:
        kind = stack[-1][1] if isinstance(stack[-1][1], str) else stack[-1][1].__name__
        where = f" in module '{stack[-1][0]}' ({kind.rpartition('.')[2]})"
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if _LIBRARY not in frame[0]]
    line = f", {Path(own[-1][0]).name} line {own[-1][1]}" if own else ""
    return f"{node.target}{where}{line}"
