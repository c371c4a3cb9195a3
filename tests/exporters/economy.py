"""Exports of tests, without work that was done before: a third of their processor time."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
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
from torch._export import utils as torch_export_utils
from torch.export import decomp_utils, exported_program
from torch.onnx import ONNXProgram
from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET
from torch.onnx._internal.exporter._registration import ONNXRegistry

from modelport.exporters import artifact_conversion, export_pipeline
from modelport.exporters.formats import tflite
from modelport.exporters.runtime import garbage

#: Whose layers are identified by their settings and weights.
OURS = ("modelport.", "torch.")


@pytest.fixture(scope="session", autouse=True)
def _economy(shared_folder: Path) -> Iterator[None]:
    if torch.onnx.export.__module__ == __name__:  # the fixture of another folder of tests
        yield
        return
    with _one_conversion_a_model(shared_folder), _one_list_of_operators(), _cheap_collections():
        yield


@contextlib.contextmanager
def _one_conversion_a_model(shared_folder: Path) -> Iterator[None]:
    """Convert each of our own models to ONNX once: most tests are about what comes after.

    Processes that run tests at the same time share what they convert.
    """
    convert = torch.onnx.export

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


@contextlib.contextmanager
def _one_list_of_operators() -> Iterator[None]:
    """Keep the lists of operators that torch makes for each conversion: a tenth of its time."""
    make_registry = ONNXRegistry.from_torchlib
    registry = functools.cache(lambda opset, _: make_registry(opset))
    operators = functools.cache(lambda _: torch_export_utils._collect_all_valid_cia_ops())

    def from_torchlib(opset_version: int = TORCHLIB_OPSET) -> ONNXRegistry:
        made = copy.copy(registry(opset_version, len(torch._C._dispatch_get_all_op_names())))
        made.functions = {target: list(found) for target, found in made.functions.items()}
        return made

    def valid_operators() -> set[Any]:
        key = "CompositeImplicitAutograd"
        known = torch._C._dispatch_get_registrations_for_dispatch_key(key)
        return set(operators(tuple(known)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(from_torchlib))
        for module in (decomp_utils, exported_program):
            patch.setattr(module, "_collect_all_valid_cia_ops", valid_operators)
        yield


@contextlib.contextmanager
def _cheap_collections() -> Iterator[None]:
    """Let each collection visit only what is new.

    Exports collect garbage twice; converters leave graphs that live as long as the run. The
    millions of objects that tests/conftest.py has frozen are not counted again either.
    """

    def collect() -> None:
        gc.collect()
        gc.freeze()

    frozen = SimpleNamespace(freeze=gc.freeze, get_freeze_count=lambda: 1)
    with pytest.MonkeyPatch.context() as patch:
        for module in (artifact_conversion, export_pipeline, tflite):
            patch.setattr(module, "gc", SimpleNamespace(collect=collect))
        patch.setattr(garbage, "gc", frozen)
        yield
