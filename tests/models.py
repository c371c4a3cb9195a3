"""Small ONNX models and repositories, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ONNX_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16,
    "BYTES": TensorProto.STRING,
}

X2_CONFIG = """
name: "x2"
backend: "onnxruntime"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""


def save(path: Path, graph: onnx.GraphProto) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def multiply(path: Path, factor: float = 2.0) -> Path:
    """FP32 ``y = factor * x``, both ``[batch, 4]``."""
    return save(
        path,
        helper.make_graph(
            [helper.make_node("Mul", ["x", "factor"], ["y"])],
            "multiply",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
            [numpy_helper.from_array(np.float32(factor), "factor")],
        ),
    )


def weighty(path: Path, factor: float = 2.0, width: int = 2**17) -> Path:
    """Write ``multiply`` with 32 bytes of weights for each of ``width``; 4 MiB by default."""
    there = np.zeros((4, width), np.float32)
    there[:, :4] = np.eye(4)
    weights = [("there", there), ("back", np.ascontiguousarray(there.T) * np.float32(factor))]
    return save(
        path,
        helper.make_graph(
            [
                helper.make_node("MatMul", ["x", "there"], ["wide"]),
                helper.make_node("MatMul", ["wide", "back"], ["y"]),
            ],
            "weighty",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
            [numpy_helper.from_array(array, name) for name, array in weights],
        ),
    )


def spread(path: Path, width: int) -> Path:
    """FP32 ``y = x * values``, of ``[batch, 1]``; ``values`` are ``width`` different fractions."""
    values = (0.5 + np.arange(width) / (2 * width)).astype(np.float32).reshape(1, width)
    return save(
        path,
        helper.make_graph(
            [helper.make_node("Mul", ["x", "values"], ["y"])],
            "spread",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", width])],
            [numpy_helper.from_array(values, "values")],
        ),
    )


def identity(path: Path, datatype: str, shape: Sequence[str | int] = ("batch", 4)) -> Path:
    """``y = x`` of any datatype."""
    onnx_type = ONNX_TYPES[datatype]
    return save(
        path,
        helper.make_graph(
            [helper.make_node("Identity", ["x"], ["y"])],
            "identity",
            [helper.make_tensor_value_info("x", onnx_type, shape)],
            [helper.make_tensor_value_info("y", onnx_type, shape)],
        ),
    )


def flatten(path: Path, shape: Sequence[int] = (3, 2, 2)) -> Path:
    """FP32 ``x`` ``[batch, *shape]`` to ``y`` ``[batch, n]``: the same values, in a row."""
    size = int(np.prod(shape))
    return save(
        path,
        helper.make_graph(
            [helper.make_node("Flatten", ["x"], ["y"], axis=1)],
            "flatten",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", size])],
        ),
    )


def add_and_subtract(path: Path, datatype: str = "FP32") -> Path:
    """Two inputs ``a``, ``b``, two outputs ``total``, ``difference``, all ``[batch, n]``."""
    onnx_type = ONNX_TYPES[datatype]
    infos = [
        helper.make_tensor_value_info(name, onnx_type, ["batch", "n"])
        for name in ("a", "b", "total", "difference")
    ]
    nodes = [
        helper.make_node("Add", ["a", "b"], ["total"]),
        helper.make_node("Sub", ["a", "b"], ["difference"]),
    ]
    return save(path, helper.make_graph(nodes, "add_and_subtract", infos[:2], infos[2:]))


def heavy(path: Path, size: int = 1024, rounds: int = 6) -> Path:
    """FP32 ``y = x`` for 0 and 1, both ``[1]``, by way of ``rounds`` products of large matrices.

    The work does not depend on the values: a good tenth of a second for others to queue behind.
    """
    nodes = [helper.make_node("Expand", ["x", "square"], ["m0"])]
    for index in range(rounds):
        nodes.append(helper.make_node("MatMul", [f"m{index}", f"m{index}"], [f"p{index}"]))
        nodes.append(helper.make_node("Div", [f"p{index}", "size"], [f"m{index + 1}"]))
    nodes.append(helper.make_node("ReduceMean", [f"m{rounds}"], ["mean"], keepdims=0))
    nodes.append(helper.make_node("Reshape", ["mean", "one"], ["y"]))
    return save(
        path,
        helper.make_graph(
            nodes,
            "heavy",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
            [
                numpy_helper.from_array(np.array([size, size], np.int64), "square"),
                numpy_helper.from_array(np.array([1], np.int64), "one"),
                numpy_helper.from_array(np.array(size, np.float32), "size"),
            ],
        ),
    )


#: For ``config(extra=...)`` of a model on pictures: their pixels as fractions of full scale.
PICTURES = 'parameters { key: "image.layout" value { string_value: "CHW" } }'


def config(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    max_batch_size: int = 8,
    backend: str = "onnxruntime",
    extra: str = "",
) -> str:
    """A ``config.pbtxt``. A tensor is ``"name DATATYPE dims [more fields]"``, dims as ``2,3``."""
    lines = [f'name: "{name}"', f'backend: "{backend}"', f"max_batch_size: {max_batch_size}"]
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors:
            tensor_name, datatype, dims, *more = tensor.split(" ", 3)
            datatype = "STRING" if datatype == "BYTES" else datatype
            sizes = " ".join(f"dims: {size}" for size in dims.split(","))
            lines.append(
                f'{kind} {{ name: "{tensor_name}" data_type: TYPE_{datatype} {sizes} '
                f"{' '.join(more)} }}"
            )
    return "\n".join([*lines, extra, ""])


def fake(root: Path, name: str, datatype: str, dims: str, **parameters: str) -> Path:
    """A model of the fake backend: ``y = x``, with the backend's ``parameters``."""
    (root / name / "1").mkdir(parents=True)
    extra = "\n".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in parameters.items()
    )
    tensors = ([f"x {datatype} {dims}"], [f"y {datatype} {dims}"])
    (root / name / "config.pbtxt").write_text(config(name, *tensors, backend="fake", extra=extra))
    return root / name


def repository(root: Path) -> Path:
    """A plain Triton repository: ``x2`` with a configuration."""
    multiply(root / "x2" / "1" / "model.onnx")
    (root / "x2" / "config.pbtxt").write_text(X2_CONFIG)
    return root


def count_up(path: Path) -> Path:
    """INT64 ``total = n``, both ``[1]``, counted one by one: about a microsecond each."""
    scalar = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["more"], ["still"]),
            helper.make_node("Add", ["sum", "one"], ["next"]),
        ],
        "count",
        [
            scalar("i", TensorProto.INT64, []),
            scalar("more", TensorProto.BOOL, []),
            scalar("sum", TensorProto.INT64, [1]),
        ],
        [scalar("still", TensorProto.BOOL, []), scalar("next", TensorProto.INT64, [1])],
    )
    return save(
        path,
        helper.make_graph(
            [
                helper.make_node("Squeeze", ["n"], ["times"]),
                helper.make_node("Loop", ["times", "", "zero"], ["total"], body=body),
            ],
            "count_up",
            [helper.make_tensor_value_info("n", TensorProto.INT64, [1])],
            [helper.make_tensor_value_info("total", TensorProto.INT64, [1])],
            [
                numpy_helper.from_array(np.array([0]), "zero"),
                numpy_helper.from_array(np.array([1]), "one"),
            ],
        ),
    )


def external(path: Path, location: str) -> Path:
    """FP32 ``y = x + w``, ``[4]``, whose weight lies in the file ``location``."""
    weight = numpy_helper.from_array(np.ones(4, np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        weight.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "external",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())  # unchecked: the location may be a hostile one
    return path


def pipeline(root: Path, name: str, text: str) -> None:
    """Write version 1 of a pipeline, whose ``pipeline.toml`` is ``text``."""
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "pipeline.toml").write_text(text)
