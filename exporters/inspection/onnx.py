"""Inspection of an ONNX file from its protobuf message; external data is not read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from modelport.exporters.inspection import (
    AxisInfo,
    ExternalFile,
    Inspection,
    TensorInfo,
    tally,
    word,
)
from modelport.gateway.errors import IntegrityError

#: Operators that hold a value; they count as weights, not as operators.
CONSTANTS = frozenset({"Constant"})


def inspect(path: Path) -> Inspection:
    """Inspect an ONNX file; raises as ``inspection.inspect``."""
    model = onnx.load(path, load_external_data=False)
    if not (model.ir_version and model.graph.node):
        raise IntegrityError(f"'{path.name}' is damaged: it holds no graph; export it again")
    constants = list(_constants(model))
    locations = {
        entry.value
        for tensor in constants
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    external = tuple(_external(path, location) for location in sorted(locations))
    initialized = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(_tensor(v) for v in model.graph.input if v.name not in initialized)
    outputs = tuple(_tensor(v) for v in model.graph.output)
    shapes = [tensor.shape or () for tensor in (*inputs, *outputs)]
    axes = dict.fromkeys(d for shape in shapes for d in shape if isinstance(d, str))
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    return Inspection(
        format="onnx",
        inputs=inputs,
        outputs=outputs,
        size_bytes=path.stat().st_size + sum(file.size_bytes for file in external),
        opset=opsets.get("ai.onnx"),
        format_version=f"IR {model.ir_version}",
        producer=" ".join(filter(None, (model.producer_name, model.producer_version))) or None,
        dynamic_axes=tuple(AxisInfo(name) for name in axes),
        weights=tally((_datatype(t.data_type), math.prod(t.dims)) for t in constants),
        operators=dict(Counter(_operators(model)).most_common()),
        external_data=external,
    )


def _datatype(number: int) -> str:
    known = {value: key for key, value in onnx.TensorProto.DataType.items()}
    return word(str(known.get(number, number)))


def _graphs(nodes: Any) -> Iterator[Any]:
    """The graphs in the attributes of ``nodes``, at any depth."""
    waiting = list(nodes)
    while waiting:
        for attribute in waiting.pop().attribute:
            for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield graph
                waiting.extend(graph.node)


def _nodes(model: Any) -> Iterator[Any]:
    """Every node of the graph, of its subgraphs, and of the functions in the file."""
    top = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    yield from top
    for graph in _graphs(top):
        yield from graph.node


def _operators(model: Any) -> Iterator[str]:
    for node in _nodes(model):
        if node.op_type not in CONSTANTS:
            domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}."
            yield domain + node.op_type


def _constants(model: Any) -> Iterator[Any]:
    yield from model.graph.initializer
    for graph in _graphs(model.graph.node):
        yield from graph.initializer
    for node in _nodes(model):
        if node.op_type in CONSTANTS:
            yield from (a.t for a in node.attribute if a.HasField("t") and a.t.dims)


def _tensor(value: Any) -> TensorInfo:
    tensor = value.type.tensor_type
    if not tensor.elem_type:
        return TensorInfo(value.name, None, None)
    shape = None
    if tensor.HasField("shape"):
        sizes = (
            d.dim_param or (d.dim_value if d.HasField("dim_value") else -1)
            for d in tensor.shape.dim
        )
        shape = tuple(sizes)
    return TensorInfo(value.name, _datatype(tensor.elem_type), shape)


def _external(path: Path, location: str) -> ExternalFile:
    """Locate external data; raise ``IntegrityError`` if it is missing or outside the folder."""
    file = path.parent / location
    if not file.resolve().is_relative_to(path.parent.resolve()):
        raise IntegrityError(
            f"'{path.name}' takes weights from '{location}', outside its folder; do not load it"
        )
    if not file.is_file():
        raise IntegrityError(
            f"'{path.name}' keeps weights in '{location}', which is missing; copy both files"
        )
    return ExternalFile(location, file.stat().st_size)
