"""PyTorch to ONNX through ``torch.export`` (the exporter that keeps dimensions symbolic)."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import nn

from exporters.samples import draw, model_dims, name_axes, sizes_of
from gateway.errors import Unsupported
from gateway.types import Array, Axis, ModelSignature

#: What torch.onnx can convert to and ONNX Runtime can run.
OPSETS = range(18, 24)

#: Past this, weights go to ``<file>.data`` beside the model: a protobuf message ends at 2 GiB.
EXTERNAL_DATA_BYTES = 1 << 30

EXAMPLE_BATCH = 2  # torch.export takes a 1 for a constant
ORT_ERRORS_ONLY = 3


def export(module: nn.Module, signature: ModelSignature, path: Path, opset: int | None) -> None:
    """Write ``module`` to ``path``, and ``<path>.data`` beside it if the weights are large.

    Inputs and outputs carry the signature's names; batch and axes are symbolic, unless the module
    itself fixes one: torch.onnx then bakes the example's size in without a word, and the proof
    fails.

    Raises:
        Unsupported: the opset, or an operator, has no conversion.
    """
    if opset is not None and opset not in OPSETS:
        raise Unsupported(f"--opset {opset} is not supported; use {OPSETS[0]} to {OPSETS[-1]}")
    signature = name_axes(signature)
    example = draw(signature, EXAMPLE_BATCH, _example_sizes(signature), np.random.default_rng(0))
    size = sum(p.numel() * p.element_size() for p in module.state_dict().values())
    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                tuple(torch.from_numpy(array) for array in example.values()),
                dynamo=True,
                dynamic_shapes=_dynamic_shapes(signature),
                input_names=[spec.name for spec in signature.inputs],
                output_names=[spec.name for spec in signature.outputs],
                opset_version=opset,
                verbose=False,
            )
            assert program is not None  # None is the other exporter's answer
            # Every node carries the stack trace of its Python line: our paths, and half the file.
            ClearMetadataAndDocStringPass()(program.model)
            program.save(path, external_data=size > EXTERNAL_DATA_BYTES)
    except OSError:
        raise
    except Exception as error:
        raise _translate(error) from error


def _translate(error: Exception) -> Unsupported:
    """torch's own account of a failed export, pages long, in one line."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reason = (str(cause).strip() or type(cause).__name__).splitlines()[0][:300]
    return Unsupported(
        f"torch.onnx cannot export this model ({reason}); rewrite what it names in forward()"
    )


def _example_sizes(signature: ModelSignature) -> dict[str, int]:
    """A middle size of each axis; equal sizes would be taken for one dimension, so they differ."""
    sizes: dict[str, int] = {}
    for name, axis in signature.axes.items():
        taken = {EXAMPLE_BATCH, *sizes.values()}
        middle = sizes_of(axis)[len(sizes_of(axis)) // 2]
        longest = axis.maximum or middle
        free = (size for size in range(max(2, middle), longest + 1) if size not in taken)
        sizes[name] = next(free, middle)
    return sizes


def _dynamic_shapes(signature: ModelSignature) -> tuple[dict[int, Any], ...]:
    batch = torch.export.Dim("batch", min=1, max=max(EXAMPLE_BATCH, signature.max_batch_size))
    axes = {name: _dim(axis) for name, axis in signature.axes.items()}
    offset = 1 if signature.max_batch_size else 0
    shapes = []
    for spec in signature.inputs:
        dims = enumerate(model_dims(spec), start=offset)
        shape = {i: axes[dim] for i, dim in dims if isinstance(dim, str) and axes[dim] is not None}
        shapes.append({0: batch, **shape} if offset else shape)
    return tuple(shapes)


def _dim(axis: Axis) -> Any:
    """None where the axis has but one size."""
    if axis.minimum == axis.maximum:
        return None
    return torch.export.Dim(axis.name, min=axis.minimum, max=axis.maximum)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter narrates on stdout, through warnings and through logging."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        logging.disable(disabled)


class OnnxSession:
    """An ONNX file in ONNX Runtime on the CPU."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = ORT_ERRORS_ONLY
        # Eager runs in turn with this session: threads that spin between runs would starve it.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = [value.name for value in self._session.get_outputs()]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        values = self._session.run(None, dict(inputs))
        return dict(zip(self.outputs, values, strict=True))


def open_session(path: Path) -> OnnxSession:
    return OnnxSession(path)
