"""The model `copy`, y = x, one vector of any length, for Triton and for modelport.

`python -m benchmarks.copy_model DIR` writes modelport's;
needs the `onnx` package.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from benchmarks.peers.servers.base import INSIDE

NAME = "copy"
CONFIG = """\
name: "copy"
backend: "{backend}"
max_batch_size: 1
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""


def write_onnx(home: Path) -> None:
    from onnx import TensorProto, checker, helper, save

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "length"])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], NAME, [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    save(model, str(_version(home, "onnxruntime") / "model.onnx"))


def write_triton(home: Path) -> None:
    shutil.copy(INSIDE / "triton_copy.py", _version(home, "python") / "model.py")


def _version(home: Path, backend: str) -> Path:
    version = home / NAME / "1"
    version.mkdir(parents=True, exist_ok=True)
    (home / NAME / "config.pbtxt").write_text(CONFIG.format(backend=backend))
    return version


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write_onnx(parser.parse_args().folder)
