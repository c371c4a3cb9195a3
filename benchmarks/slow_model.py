"""The model `slow`, y = 2x, after 5 ms of matrix multiplication on one core.

`python -m benchmarks.slow_model DIR [MORE]` writes it,
with MORE in its configuration; needs the packages `onnx` and `onnxruntime`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import ModelProto

NAME = "slow"
#: Side of the matrices; a multiplication is 0.27 GFLOP.
SIDE = 512
#: The duration of an inference on this machine, and the runs that find it.
SECONDS, RUNS = 0.005, 20

CONFIG = """\
name: "slow"
backend: "onnxruntime"
max_batch_size: 1
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""


def _model(multiplications: int) -> ModelProto:
    import numpy as np
    from onnx import TensorProto, checker, helper, numpy_helper

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    eye = np.eye(SIDE, dtype=np.float32)
    constants = [
        numpy_helper.from_array(eye, "eye"),
        numpy_helper.from_array(np.zeros((), np.float32), "zero"),
        numpy_helper.from_array(np.full((), 2, np.float32), "two"),
    ]
    products = range(multiplications)
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["eye", "sum"], ["m0"]),
        *(helper.make_node("MatMul", [f"m{n}", "eye"], [f"m{n + 1}"]) for n in products),
        helper.make_node("ReduceSum", [f"m{multiplications}"], ["all"], keepdims=0),
        helper.make_node("Mul", ["all", "zero"], ["nothing"]),
        helper.make_node("Mul", ["x", "two"], ["twice"]),
        helper.make_node("Add", ["twice", "nothing"], ["y"]),
    ]
    graph = helper.make_graph(nodes, NAME, [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    return model


def _multiplications() -> int:
    """Find the number of them that takes ``SECONDS`` on this machine."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    tried = 4
    session = onnxruntime.InferenceSession(_model(tried).SerializeToString(), options)
    row = {"x": np.ones((1, 4), np.float32)}
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        session.run(None, row)
        seconds.append(time.perf_counter() - began)
    return max(1, round(SECONDS / min(seconds) * tried))


def write(home: Path, more: str = "") -> None:
    """Write the model; ``more`` is appended to its configuration."""
    version = home / NAME / "1"
    version.mkdir(parents=True, exist_ok=True)
    (home / NAME / "config.pbtxt").write_text(CONFIG + more)
    (version / "model.onnx").write_bytes(_model(_multiplications()).SerializeToString())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("more", nargs="?", default="", help="lines for config.pbtxt")
    options = parser.parse_args()
    write(options.folder, options.more)
