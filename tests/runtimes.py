"""Slow tests of runtimes: compiled archives, and memory after many reloads.

``python -m tests.runtimes`` serves the small models compiled by AOTInductor and holds the answers
against eager PyTorch. Then it loads and unloads a model with megabytes of weights many times in
every runtime, each in a process of its own, and measures what stays in memory; a variant that keeps
every tenth backend must be caught. It exits with 1 where anything differs.
"""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOADS, SETTLED = 50, 10
#: Of the model's weights: small enough to be quick, large enough that one copy is seen.
WIDTH = 1600
WEIGHT_BYTES = 2 * WIDTH * WIDTH * 4
#: Copies of the weights that may be left after all loads. The allocator keeps one more or less from
#: run to run; a backend that leaks in one load of ten keeps four and more.
MAX_GROWTH = 2.0
FORMATS = ("onnx", "torchscript", "pt2", "savedmodel", "tflite")


def main() -> int:
    """Run all of it; one line each."""
    failed = False
    with tempfile.TemporaryDirectory() as work:
        for name, error, tolerance in _compiled(Path(work)):
            print(f"{name:<12} aoti {error:>22.2g} of {tolerance:.2g} allowed")
            failed |= not error <= tolerance  # a NaN fails too
        _publish_large(Path(work))
        for name in FORMATS:
            for leaking in (False, True):
                grown = _grown(Path(work), name, leaking) / WEIGHT_BYTES
                failed |= (grown > MAX_GROWTH) is not leaking
                what = "leaking on purpose" if leaking else f"{LOADS} loads"
                print(f"{name:<12} {what:<20} {grown:>6.2f} copies of its weights stayed")
    return 1 if failed else 0


def _compiled(work: Path) -> Any:
    from tests.gateway.backends.embedded import runtimes

    for name in runtimes.MODELS:
        model = runtimes.source(name)
        version = runtimes.publish(work, f"{name}_aoti", model, "aoti")
        backend = runtimes.load(version, native=True)
        errors = [runtimes.error_of(backend, model, case) for case in runtimes.cases(model)]
        backend.unload()
        yield name, max(errors), model.spec.atol


def _publish_large(work: Path) -> None:
    """``y = relu(x A) B`` in every format; in a process of its own, for it imports them all."""
    code = (
        "import sys, tests.runtimes as t; t.publish_large(__import__('pathlib').Path(sys.argv[1]))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(work)]
    subprocess.run(command, check=True, capture_output=True)


def publish_large(work: Path) -> None:
    import torch

    from modelport.exporters.runtime.tensorflow_runtime import tf

    def at(name: str, filename: str) -> Path:
        (work / name / "1").mkdir(parents=True)
        return work / name / "1" / filename

    module = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    ).eval()
    example = torch.rand(2, WIDTH)
    torch.jit.trace(module, example).save(at("torchscript", "model.pt"))
    batch = torch.export.Dim("batch")
    exported = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
    exported.example_inputs = None
    torch.export.save(exported, at("pt2", "model.pt2"))
    torch.onnx.export(
        module, (example,), at("onnx", "model.onnx"), input_names=["x"], output_names=["y"],
        dynamic_shapes=({0: batch},), external_data=False,
    )  # fmt: skip
    servable = tf.Module()
    servable.weights = [tf.Variable(tf.random.normal([WIDTH, WIDTH])) for _ in range(2)]

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH], tf.float32, "x")])
    def serve(x: Any) -> dict[str, Any]:
        hidden = tf.nn.relu(tf.matmul(x, servable.weights[0]))
        return {"y": tf.matmul(hidden, servable.weights[1])}

    folder = str(at("savedmodel", "model.savedmodel"))
    tf.saved_model.save(servable, folder, signatures={"serving_default": serve})
    converter = tf.lite.TFLiteConverter.from_saved_model(folder)
    at("tflite", "model.tflite").write_bytes(converter.convert())


def _grown(work: Path, name: str, leaking: bool) -> float:
    command = [sys.executable, "-m", "tests.runtimes", str(work), name, str(int(leaking))]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def grown_here(work: Path, name: str, leaking: bool) -> float:
    """Bytes that stay after ``LOADS`` loads, compared with after ``SETTLED``."""
    from modelport.gateway.repository import config
    from tests.gateway.backends.embedded import runtimes

    platform = next(p for p in config.PLATFORMS if p.format == name)
    text = (
        f'backend: "{platform.backend}" default_model_filename: "{platform.default_filename}" '
        f'max_batch_size: 4 input {{ name: "x" data_type: TYPE_FP32 dims: {WIDTH} }} '
        f'output {{ name: "y" data_type: TYPE_FP32 dims: {WIDTH} }}'
    )
    kept, settled = [], 0
    for number in range(LOADS):
        backend = runtimes.load(work / name / "1", text)
        if leaking and number % 10 == 0:
            kept.append(backend)
        else:
            backend.unload()
        del backend
        if number == SETTLED:
            settled = _resident_bytes()
    return _resident_bytes() - settled


def _resident_bytes() -> int:
    assert gc.isenabled()  # as it is in the gateway: nothing is collected by hand
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    if sys.argv[1:]:
        print(grown_here(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"))
    else:
        sys.exit(main())
