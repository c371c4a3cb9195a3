"""Inspection of an OpenVINO IR from its XML; OpenVINO is not needed."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from modelport.exporters.inspection import ExternalFile, Inspection, TensorInfo, tally, word
from modelport.gateway.repository.artifact_checks import openvino_guard
from modelport.gateway.repository.artifact_checks.openvino_guard import CONSTANT, Layer, Port

#: Layers that mark an input, an output or a value.
PASSIVE = frozenset({CONSTANT, "Parameter", "Result"})
#: OpenVINO's datatype names whose long form is the protocol's.
_PREFIXES = {"f": "FP", "i": "INT", "u": "UINT", "bf": "BF"}


def inspect(path: Path) -> Inspection:
    """Inspect an OpenVINO model; raises as ``inspection.inspect``."""
    layers = list(openvino_guard.layers(path))
    weights = path.with_suffix(".bin")
    external = (ExternalFile(weights.name, weights.stat().st_size),) if weights.is_file() else ()
    outermost = min((layer.depth for layer in layers), default=0)
    own = [layer for layer in layers if layer.depth == outermost]
    opsets = [int(layer.opset.removeprefix("opset")) for layer in layers]
    return Inspection(
        format="openvino",
        inputs=tuple(_input(layer) for layer in own if layer.kind == "Parameter"),
        outputs=tuple(_output(layer) for layer in own if layer.kind == "Result"),
        size_bytes=path.stat().st_size + sum(file.size_bytes for file in external),
        opset=max(opsets, default=None),
        format_version="IR",
        weights=tally(
            (_datatype(layer.data["element_type"]), _count(layer))
            for layer in layers
            if layer.kind == CONSTANT
        ),
        operators=dict(
            Counter(layer.kind for layer in layers if layer.kind not in PASSIVE).most_common()
        ),
        external_data=external,
    )


def _input(layer: Layer) -> TensorInfo:
    port = layer.outputs[0]
    return _tensor(_first(port.names) or layer.name, port)


def _output(layer: Layer) -> TensorInfo:
    return _tensor(_first(layer.output_names) or layer.name, layer.inputs[0])


def _tensor(name: str, port: Port) -> TensorInfo:
    return TensorInfo(name, _datatype(port.precision), tuple(port.dims))


def _first(names: str) -> str:
    return min(names.split(","))


def _datatype(name: str) -> str:
    """The protocol's name: ``FP32`` for ``f32``, ``BOOL`` for ``boolean``."""
    lower = name.lower()
    if lower == "boolean":
        return "BOOL"
    prefix = lower.rstrip("0123456789")
    return word(_PREFIXES.get(prefix, prefix) + lower.removeprefix(prefix))


def _count(layer: Layer) -> int:
    return math.prod(int(size) for size in layer.data.get("shape", "").split(",") if size.strip())
