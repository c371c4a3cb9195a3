"""The model `slow`, y = 2x, after some milliseconds of matrix multiplication on one core.

`python -m modelport.loadtests.benchmarks.slow_model DIR [MORE]` writes it,
with MORE in its configuration; needs the `onnx` package.
"""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "slow"
SIDE = 512  # 0.27 GFLOP each time
TIMES = 2

CONFIG = """\
name: "slow"
backend: "onnxruntime"
max_batch_size: 1
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""


def write(home: Path, more: str = "") -> None:
    """Write the model; ``more`` is appended to its configuration."""
    import numpy as np
    from onnx import TensorProto, checker, helper, numpy_helper, save

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    eye = np.eye(SIDE, dtype=np.float32)
    constants = [
        numpy_helper.from_array(eye, "eye"),
        numpy_helper.from_array(np.zeros((), np.float32), "zero"),
        numpy_helper.from_array(np.full((), 2, np.float32), "two"),
    ]
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["eye", "sum"], ["m0"]),
        *(helper.make_node("MatMul", [f"m{n}", "eye"], [f"m{n + 1}"]) for n in range(TIMES)),
        helper.make_node("ReduceSum", [f"m{TIMES}"], ["all"], keepdims=0),
        helper.make_node("Mul", ["all", "zero"], ["nothing"]),
        helper.make_node("Mul", ["x", "two"], ["twice"]),
        helper.make_node("Add", ["twice", "nothing"], ["y"]),
    ]
    graph = helper.make_graph(nodes, NAME, [x], [y], constants)
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    checker.check_model(model)
    version = home / NAME / "1"
    version.mkdir(parents=True, exist_ok=True)
    (home / NAME / "config.pbtxt").write_text(CONFIG + more)
    save(model, str(version / "model.onnx"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("more", nargs="?", default="", help="lines for config.pbtxt")
    options = parser.parse_args()
    write(options.folder, options.more)
