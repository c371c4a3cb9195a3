"""The unmodified ``tensorflow-serving-api`` stubs against a real gateway.

    python -m tests.tfserving_clients

The stubs and the TensorFlow they need have an environment of their own, made once in ``.peers/``;
``calls.py`` runs in it and knows nothing of the gateway. Exits with 1 if anything is not as it must
be.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from modelport.loadtests.system import environments
from tests import models
from tests.conformance.repository import IDENTITY, LABELS, add
from tests.server import serving

VERSION = "2.21.0"
RUN_SECONDS = 300
FLAGS = ("--model-control-mode", "explicit", "--load-model", "*")


def build(root: Path) -> Path:
    """Build the repository that ``calls.py`` expects."""
    for datatype, name in IDENTITY.items():
        text = models.config(name, [f"x {datatype} -1"], [f"y {datatype} -1"])
        models.identity(add(root, name, text), datatype, ("batch", "n"))
    label = 'parameters { key: "version_label.stable" value { string_value: "1" } }'
    text = models.config("m", ["x FP32 4"], ["y FP32 4"], extra="version_policy { all {} }" + label)
    add(root, "m", text)
    for version in (1, 2):
        models.multiply(root / "m" / str(version) / "model.onnx", float(version))
    text = models.config("two", ["a FP32 -1", "b FP32 -1"], ["total FP32 -1", "difference FP32 -1"])
    models.add_and_subtract(add(root, "two", text))
    text = models.config("scores", ["x FP32 3"], ['y FP32 3 label_filename: "labels.txt"'])
    models.identity(add(root, "scores", text), "FP32", ("batch", 3))
    (root / "scores" / "labels.txt").write_text("\n".join(LABELS))
    reshape = "reshape { shape: [] }"
    text = models.config("scalar", [f"x FP32 1 {reshape}"], [f"y FP32 1 {reshape}"])
    models.identity(add(root, "scalar", text), "FP32", ("batch",))
    models.fake(root, "slow", "INT64", "1", delay_seconds="0.5")
    _half_sum(add(root, "sum", models.config("sum", ["x FP32 4"], ["outputs FP32 1"])))
    return root


def _half_sum(path: Path) -> None:
    """FP32 ``outputs = sum(x) / 2``, ``[batch, 4]`` → ``[batch, 1]``."""
    halves = numpy_helper.from_array(np.full((4, 1), 0.5, np.float32), "halves")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "halves"], ["outputs"])],
        "half_sum",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("outputs", TensorProto.FLOAT, ["batch", 1])],
        [halves],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


def main() -> int:
    try:
        python = environments.venv("tfserving_clients", f"tensorflow-serving-api=={VERSION}")
    except environments.Missing as error:
        print(error, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        root = build(Path(folder) / "models")
        with serving(root, *FLAGS) as gateway:
            calls = str(Path(__file__).with_name("calls.py"))
            command = [str(python / "python"), calls, gateway.grpc, gateway.http]
            quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
            done = subprocess.run(
                command, env={**os.environ, **quiet}, timeout=RUN_SECONDS, check=False
            )
    print(f"tensorflow-serving-api {VERSION}: {'failed' if done.returncode else 'no error'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
