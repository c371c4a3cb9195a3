"""Exports of tests, without work that was done before: a third of their processor time."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir
import pytest
import torch
from torch import nn
from torch.onnx import ONNXProgram

from modelport.exporters import artifact_conversion, export_pipeline
from modelport.exporters.formats import tflite

#: Whose layers are identified by their settings and weights.
OURS = ("modelport.", "torch.")


@pytest.fixture(scope="session", autouse=True)
def _one_conversion_a_model(shared_folder: Path) -> Iterator[None]:
    """Convert each of our own models to ONNX once: most tests are about what comes after.

    Processes that run tests at the same time share what they convert.
    """
    convert = torch.onnx.export
    if convert.__module__ == __name__:  # the fixture of another folder of tests
        yield
        return

    def export(module: nn.Module, inputs: Any, **options: Any) -> Any:
        if any(not type(m).__module__.startswith(OURS) for m in module.modules()):
            return convert(module, inputs, **options)
        path = shared_folder / f"{identity(module, inputs, options)}.onnx"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return ONNXProgram(onnx_ir.load(path), None)
            program = convert(module, inputs, **options)
            assert program is not None
            with contextlib.suppress(OSError):  # some tests fill the disk
                program.save(path.with_suffix(".new"))
                path.with_suffix(".new").rename(path)
            return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", export)
        yield


def identity(module: nn.Module, inputs: Any, options: dict[str, Any]) -> str:
    """Return a digest of all that a conversion depends on."""
    parts = [repr(options), repr(inputs)]
    for name, part in module.named_modules():
        plain = {k: v for k, v in vars(part).items() if isinstance(v, int | float | str | tuple)}
        parts.append(f"{name} {type(part)} {part.extra_repr()} {plain}")
    digest = hashlib.sha256("\n".join(parts).encode())
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="session", autouse=True)
def _each_collection_looks_at_what_is_new() -> Iterator[None]:
    """Exports collect garbage twice; converters leave graphs that live as long as the run."""

    def collect() -> None:
        gc.collect()
        gc.freeze()

    with pytest.MonkeyPatch.context() as patch:
        for module in (artifact_conversion, export_pipeline, tflite):
            patch.setattr(module, "gc", SimpleNamespace(collect=collect))
        yield
