"""Exported TensorFlow Lite files on ``tflite-runtime`` 2.14, which many devices still carry.

It does not work with numpy 2, so it runs in an environment of its own, made under ``.peers/`` with
Python 3.11, the last that it has wheels for. ``python -m tests.tflite_runtime`` exports small and
demo-sized models, runs them there at several batch sizes and lengths, and holds what comes back
against eager PyTorch. It exits with 1 where anything differs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from modelport.exporters.loaded_model import Source

REQUIREMENTS = ("tflite-runtime==2.14.0", "numpy<2")
PRECISIONS = ("fp32", "fp16")
BATCH_SIZES = (1, 2, 8)

#: Half precision keeps eleven bits of a weight.
FP16_TOLERANCE = 5e-3


def main() -> int:
    """Export, run there, compare; one line each."""
    from modelport.exporters.formats import tflite
    from modelport.exporters.formats.base import ExportTarget
    from modelport.loadtests.system import environments

    python = str(environments.venv("tflite-runtime", *REQUIREMENTS) / "python")
    print(f"{'model':<12} {'precision':<10} {'cases':>5} {'max error':>10} {'tolerance':>10}")
    failed = False
    for name, source in _sources():
        for precision in PRECISIONS:
            with tempfile.TemporaryDirectory() as work:
                folder = Path(work)
                tflite.export(source, folder / "model.tflite", ExportTarget(precision))
                expected = _write_cases(source, folder)
                # -P: this file has the name of the library that it imports there.
                subprocess.run([python, "-P", __file__, work], check=True)
                errors = list(_errors(folder, expected))
            worst = max(errors)
            tolerance = source.spec.atol if precision == "fp32" else FP16_TOLERANCE
            failed |= not worst <= tolerance  # a NaN fails too
            print(f"{name:<12} {precision:<10} {len(errors):>5} {worst:>10.2g} {tolerance:>10.2g}")
    return 1 if failed else 0


def _sources() -> Iterator[tuple[str, Source]]:
    """Both models in two sizes, every layer distinct."""
    import torch

    from modelport.exporters.demo_models import train
    from modelport.exporters.models.fraud import FraudTransformer
    from modelport.exporters.models.vit import VisionTransformer
    from modelport.exporters.sources.pytorch import source
    from tests.exporters import conftest

    rows: list[tuple[str, Any, dict[str, Any]]] = [
        ("fraud tiny", FraudTransformer, conftest.FRAUD_KWARGS),
        ("fraud demo", FraudTransformer, train.FRAUD_KWARGS),
        ("vit tiny", VisionTransformer, conftest.VIT_KWARGS),
        ("vit demo", VisionTransformer, train.VIT_KWARGS),
    ]
    for name, factory, kwargs in rows:
        torch.manual_seed(0)
        module, spec = factory(**kwargs), factory.modelport_spec
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        yield name, source(module, spec, spec.signature(module, 8), model_kwargs=kwargs)


def _write_cases(source: Source, folder: Path) -> dict[str, dict[str, Any]]:
    """Inputs as ``.npz`` files; what eager PyTorch makes of each, by the file's name."""
    from modelport.exporters.requests.random_inputs import draw, sizes_of

    rng, expected = np.random.default_rng(0), {}
    lengths = [
        {axis.name: size} for axis in source.signature.axes.values() for size in sizes_of(axis)
    ]
    for batch in BATCH_SIZES:
        for sizes in lengths or [{}]:
            inputs = draw(source.signature, batch, sizes, rng)
            name = f"{len(expected)}.npz"
            np.savez(folder / name, **inputs)
            expected[name] = source.reference(inputs)
    return expected


def _errors(folder: Path, expected: dict[str, dict[str, Any]]) -> Iterator[float]:
    for name, outputs in expected.items():
        with np.load(folder / "outputs" / name) as actual:
            assert sorted(actual) == sorted(outputs)
            for output, value in outputs.items():
                assert actual[output].shape == value.shape
                assert actual[output].dtype == value.dtype
                yield float(np.max(np.abs(actual[output] - value)))


def run_there(folder: Path) -> None:
    """In the other environment: the model in ``folder`` on every case."""
    from tflite_runtime.interpreter import Interpreter

    runner = Interpreter(str(folder / "model.tflite")).get_signature_runner("serving_default")
    (folder / "outputs").mkdir()
    for case in sorted(folder.glob("*.npz")):
        with np.load(case) as inputs:
            np.savez(folder / "outputs" / case.name, **runner(**inputs))


if __name__ == "__main__":
    if sys.argv[1:]:
        run_there(Path(sys.argv[1]))
    else:
        sys.exit(main())
