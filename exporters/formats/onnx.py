"""PyTorch to ONNX through ``torch.export``, which keeps dimensions symbolic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import nn
from torch.onnx import ONNXProgram

from modelport.exporters.formats import ExportTarget, onnx_difference, onnx_quantization, tracing
from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.gateway.cli.errors import converter_refused
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import Array

#: Operator sets that torch.onnx writes and ONNX Runtime runs.
OPSETS = range(18, 24)

#: Larger weights go to ``<file>.data`` beside the model, as a protobuf message ends at 2 GiB.
EXTERNAL_DATA_BYTES = 1 << 30


def export(source: Source, path: Path, target: ExportTarget) -> None:
    """Write ``source`` to ``path``, and ``<path>.data`` beside it if the weights are large.

    Inputs and outputs have the signature's names; batch and axes are symbolic, unless the module
    itself fixes one: torch.onnx then silently bakes in the example's size, and the proof
    fails.

    Raises:
        Unsupported: the opset, or an operator, has no conversion.
    """
    if target.opset is not None and target.opset not in OPSETS:
        raise Unsupported(
            f"--opset {target.opset} is not supported; use {OPSETS[0]} to {OPSETS[-1]}"
        )
    with quiet():
        module = tracing.at_precision(source.model, target.dtype, source.signature)
    size = _size_of(module)
    try:
        with quiet(), inference_mode(module):
            program = _convert(source, module, target)
            # Every node carries the stack trace of its Python line: local paths, and half of the
            # file.
            ClearMetadataAndDocStringPass()(program.model)
            program.save(path, external_data=size > EXTERNAL_DATA_BYTES)
    except OSError:
        raise
    except Exception as error:
        raise converter_refused(error, "torch.onnx") from error
    if target.quantize:
        onnx_quantization.to_int8(path, size > EXTERNAL_DATA_BYTES)


def _size_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.state_dict().values())


def _convert(source: Source, module: nn.Module, target: ExportTarget) -> ONNXProgram:
    signature = source.signature
    program = torch.onnx.export(
        module,
        tracing.example_inputs(signature, source.spec.masks),
        dynamo=True,
        dynamic_shapes=tracing.dynamic_shapes(signature, module),
        input_names=[spec.name for spec in signature.inputs],
        output_names=[spec.name for spec in signature.outputs],
        opset_version=target.opset,
        verbose=False,
    )
    assert program is not None  # the other exporter returns None
    return program


def first_difference(
    source: Source, path: Path, target: ExportTarget, inputs: Mapping[str, Array]
) -> str:
    """Describe the operator at which the file at ``path`` and ``source`` part; empty if unknown.

    Large models are not converted twice.
    """
    if target.precision != "fp32" or _size_of(source.model) > EXTERNAL_DATA_BYTES:
        return ""
    with quiet(), inference_mode(source.model):
        program = _convert(source, source.model, target).exported_program
    if program is None:
        return ""
    return onnx_difference.find(program, path, source.signature, inputs)
