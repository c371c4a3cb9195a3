"""The 4-float model `x2`, y = 2x, in a repository layout that every server here can read.

`python -m benchmarks.tiny_model DIR` writes it; needs the `onnx` package.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

from modelport.loadtests.system import environments

NAME = "x2"
VALUES = (1.0, 2.0, 3.0, 4.0)
OPSET, IR_VERSION = 17, 8

CONFIG = f"""\
name: "{NAME}"
backend: "onnxruntime"
max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""


def repository() -> Path:
    """A model repository with `x2`, made if it is missing."""
    home = environments.folder("model_repository")
    if not (home / NAME / "1" / "model.onnx").is_file():
        python = sys.executable
        if importlib.util.find_spec("onnx") is None:
            python = str(environments.venv("onnx", "onnx") / "python")
        command = [python, "-m", "benchmarks.tiny_model", str(home)]
        subprocess.run(command, cwd=environments.ROOT, check=True)
    return home


def write(home: Path) -> None:
    from onnx import TensorProto, checker, helper, save

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    two = helper.make_tensor("two", TensorProto.FLOAT, [], [2.0])
    node = helper.make_node("Mul", ["x", "two"], ["y"])
    graph = helper.make_graph([node], NAME, [x], [y], [two])
    opset = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION)
    checker.check_model(model)
    version = home / NAME / "1"
    version.mkdir(parents=True, exist_ok=True)
    (home / NAME / "config.pbtxt").write_text(CONFIG)
    save(model, str(version / "model.onnx"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
