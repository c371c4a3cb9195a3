"""Operations of TensorFlow in ONNX that ``tf2onnx`` lacks: spectra and a few functions.

ONNX has no complex numbers: the last axis of a spectrum has its real and imaginary parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

Handler = Callable[[Any, Any, str, Any], None]


def erfc(graph: Any, node: Any, name: str, _: Any) -> None:
    """Convert ``Erfc``, which TensorFlow's exact GELU uses, to ONNX's ``Erf``."""
    erf = _made(graph, "Erf", [node.input[0]], node)
    _replaced(graph, node, "Sub", [_one(graph, node), erf])


def log1p(graph: Any, node: Any, name: str, _: Any) -> None:
    _replaced(graph, node, "Log", [_made(graph, "Add", [node.input[0], _one(graph, node)], node)])


def bucketize(graph: Any, node: Any, name: str, _: Any) -> None:
    """Convert ``Bucketize`` to the number of boundaries that each value reaches."""
    end = graph.make_const(f"{name}_end", np.array([-1], np.int64)).output[0]
    kind = onnx.helper.tensor_dtype_to_np_dtype(graph.get_dtype(node.input[0]))
    # An integer reaches a fraction where it reaches the next integer.
    wanted = np.array(node.get_attr("boundaries").floats, np.float32)
    limits = (np.ceil(wanted) if kind.kind == "i" else wanted).astype(kind)
    bounds = graph.make_const(f"{name}_boundaries", limits).output[0]
    values = graph.make_node("Unsqueeze", [node.input[0], end]).output[0]
    reached = graph.make_node("GreaterOrEqual", [values, bounds]).output[0]
    counted = graph.make_node("Cast", [reached], attr={"to": onnx.TensorProto.INT32}).output[0]
    _replaced(graph, node, "ReduceSum", [counted, end], keepdims=0)


def rfft(graph: Any, node: Any, name: str, _: Any) -> None:
    """Convert ``RFFT`` of the last axis to one side of ONNX's ``DFT``."""
    shape, whole = graph.get_shape(node.input[0]), graph.get_shape(node.output[0])
    end = graph.make_const(f"{name}_end", np.array([-1], np.int64)).output[0]
    signal = graph.make_node("Unsqueeze", [node.input[0], end]).output[0]
    sizes = graph.make_node("Cast", [node.input[1]], attr={"to": onnx.TensorProto.INT64})
    size = graph.make_node("Squeeze", [sizes.output[0]]).output[0]
    graph.remove_node(node.name)
    graph.make_node(
        "DFT",
        [signal, size],
        attr={"axis": len(shape) - 1, "onesided": 1},
        name=node.name,
        outputs=node.output,
        shapes=[[*whole, 2]],
        dtypes=[onnx.TensorProto.FLOAT],
    )


def complex_abs(graph: Any, node: Any, name: str, _: Any) -> None:
    end = graph.make_const(f"{name}_end", np.array([-1], np.int64)).output[0]
    _replaced(graph, node, "ReduceL2", [node.input[0], end], keepdims=0)


def part(number: int) -> Handler:
    """The handler of ``Real`` or ``Imag``."""

    def handler(graph: Any, node: Any, name: str, _: Any) -> None:
        index = graph.make_const(f"{name}_part", np.array(number, np.int64)).output[0]
        _replaced(graph, node, "Gather", [node.input[0], index], axis=-1)

    return handler


#: The first operator set that has ``DFT`` and takes axes as inputs.
SPECTRA_OPSET = 18
FUNCTIONS: Mapping[str, Handler] = {"Bucketize": bucketize, "Erfc": erfc, "Log1p": log1p}
SPECTRA: Mapping[str, Handler] = {
    "ComplexAbs": complex_abs,
    "RFFT": rfft,
    "Real": part(0),
    "Imag": part(1),
}


def handlers(opset: int) -> dict[str, tuple[Handler, list[Any]]]:
    """The functions that convert operations, by the names of these, as ``tf2onnx`` takes them."""
    chosen = {**FUNCTIONS, **(SPECTRA if opset >= SPECTRA_OPSET else {})}
    return {name: (handler, []) for name, handler in chosen.items()}


def _one(graph: Any, node: Any) -> str:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(graph.get_dtype(node.output[0]))
    return str(graph.make_const(f"{node.name}_one", np.ones((), dtype)).output[0])


def _made(graph: Any, kind: str, inputs: list[str], node: Any) -> str:
    shape, dtype = graph.get_shape(node.output[0]), graph.get_dtype(node.output[0])
    return str(graph.make_node(kind, inputs, shapes=[shape], dtypes=[dtype]).output[0])


def _replaced(graph: Any, node: Any, kind: str, inputs: list[str], **attributes: int) -> None:
    shape, dtype = graph.get_shape(node.output[0]), graph.get_dtype(node.output[0])
    graph.remove_node(node.name)
    graph.make_node(
        kind,
        inputs,
        attr=attributes,
        name=node.name,
        outputs=node.output,
        shapes=[shape],
        dtypes=[dtype],
    )
