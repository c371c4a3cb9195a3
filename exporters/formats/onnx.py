"""PyTorch to ONNX through ``torch.export``, which keeps dimensions symbolic."""

from __future__ import annotations

from pathlib import Path

import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

from modelport.exporters.formats import ExportTarget, onnx_quantization, tracing
from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.gateway.cli.errors import converter_refused
from modelport.gateway.errors import Unsupported

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
    signature = source.signature
    with quiet():
        module = tracing.at_precision(source.model, target.dtype, signature)
    size = sum(p.numel() * p.element_size() for p in module.state_dict().values())
    try:
        with quiet(), inference_mode(module):
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
