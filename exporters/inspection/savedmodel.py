"""Inspection of a SavedModel from its protobuf message and variable index; no graph is loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from modelport.exporters.inspection import (
    SAVED_MODEL,
    ExternalFile,
    Inspection,
    TensorInfo,
    tally,
    word,
)
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.artifact_checks.saved_model_guard import MAX_BYTES

SIGNATURE = "serving_default"
VARIABLES = "variables/variables"

#: Nodes that are a variable.
HANDLES = frozenset({"VarHandleOp", "Variable", "VariableV2"})

#: Nodes that hold or mark a value, or call a function; the function's own nodes are counted.
PASSIVE = HANDLES | {
    "Const",
    "NoOp",
    "PartitionedCall",
    "Placeholder",
    "ReadVariableOp",
    "StatefulPartitionedCall",
}


def inspect(path: Path) -> Inspection:
    """Inspect a SavedModel; raises as ``inspection.inspect``."""
    # Imported after the runtime, which keeps TensorFlow's import quiet.
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    stored = SavedModel()
    stored.ParseFromString(untrusted_files.read(path / SAVED_MODEL, MAX_BYTES))
    if not stored.meta_graphs:
        raise _damaged(path, f"{SAVED_MODEL} holds no graph")
    meta = next((m for m in stored.meta_graphs if "serve" in m.meta_info_def.tags), None)
    meta = meta or stored.meta_graphs[0]
    signature = meta.signature_def.get(SIGNATURE)
    outputs = () if signature is None else signature.outputs.values()
    graph = _Graph(meta.graph_def, (value.name for value in outputs))
    shards = sorted(path.glob(f"{VARIABLES}.data-*"))
    unused = sum(_checkpoint(path).values()) - sum(tally(graph.variables).values())
    if unused < 0:
        raise _damaged(path, "it does not store every variable that it uses")
    notes = [f"it has no signature '{SIGNATURE}'"] * (signature is None)
    notes += [f"{unused:,} more values are stored and not used"] * (unused > 0)
    return Inspection(
        format="savedmodel",
        inputs=() if signature is None else tuple(map(_tensor, signature.inputs.items())),
        outputs=() if signature is None else tuple(map(_tensor, signature.outputs.items())),
        size_bytes=sum((path / name).lstat().st_size for name in untrusted_files.below(path)),
        opset=meta.graph_def.versions.producer or None,
        format_version=f"schema {stored.saved_model_schema_version}",
        producer=f"tensorflow {meta.meta_info_def.tensorflow_version or 'unknown'}",
        weights=tally((*graph.variables, *graph.constants)),
        operators=dict(graph.operators.most_common()),
        external_data=tuple(
            ExternalFile(file.relative_to(path).as_posix(), file.stat().st_size) for file in shards
        ),
        notes=tuple(notes),
    )


def _damaged(path: Path, reason: str) -> IntegrityError:
    return IntegrityError(f"'{path.name}' is damaged: {reason}; export the model again")


def _datatype(number: int) -> str:
    return word(tf.dtypes.as_dtype(number).name)


def _tensor(named: tuple[str, Any]) -> TensorInfo:
    name, info = named
    shape = info.tensor_shape
    sizes = None if shape.unknown_rank else tuple(int(dim.size) for dim in shape.dim)
    return TensorInfo(name, _datatype(info.dtype), sizes)


def _checkpoint(path: Path) -> dict[str, int]:
    """Number of stored values of each datatype."""
    if not (path / f"{VARIABLES}.index").is_file():
        return {}
    try:
        reader = tf.train.load_checkpoint(str(path / VARIABLES))
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise _damaged(path, f"{VARIABLES}.index does not parse") from error
    return tally((word(dtypes[name].name), math.prod(shape)) for name, shape in shapes.items())


class _Graph:
    """The nodes that the tensors named ``outputs`` depend on.

    Attributes:
        operators: number of occurrences; a function's count once per call.
        variables: datatype and size of each.
        constants: datatype and size of each, without scalars.
    """

    def __init__(self, graph: Any, outputs: Iterable[str]) -> None:
        self.variables: list[tuple[str, int]] = []
        self.constants: list[tuple[str, int]] = []
        self._functions = {f.signature.name: f for f in graph.library.function}
        self._known: dict[str, Counter[str]] = {}
        nodes = {node.name: node for node in graph.node}
        waiting, reached = list(outputs), {}
        while waiting:
            name = waiting.pop().lstrip("^").partition(":")[0]
            if name in nodes and name not in reached:
                reached[name] = nodes[name]
                waiting.extend(nodes[name].input)
        self.operators = self._count(reached.values())

    def _count(self, nodes: Iterable[Any]) -> Counter[str]:
        operators: Counter[str] = Counter()
        for node in nodes:
            if node.op not in PASSIVE:
                operators[node.op] += 1
            if node.op in HANDLES:
                sizes = [dim.size for dim in node.attr["shape"].shape.dim]
                self.variables.append((_datatype(node.attr["dtype"].type), math.prod(sizes)))
            if node.op == "Const":
                value = node.attr["value"].tensor
                sizes = [dim.size for dim in value.tensor_shape.dim]
                if sizes:
                    self.constants.append((_datatype(value.dtype), math.prod(sizes)))
            if node.op in self._functions:  # a call by the function's own name
                operators += self._call(node.op)
            for attribute in node.attr.values():
                for function in (attribute.func, *attribute.list.func):
                    operators += self._call(function.name)
        return operators

    def _call(self, name: str) -> Counter[str]:
        if name not in self._known:
            self._known[name] = Counter()  # a function that calls itself counts once
            if name in self._functions:
                self._known[name] = self._count(self._functions[name].node_def)
        return self._known[name]
