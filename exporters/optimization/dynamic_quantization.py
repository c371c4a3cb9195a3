"""int8 quantisation of ONNX files: dynamic, activations are quantised at run time.

Weights use seven of the eight bits. Processors without VNNI multiply with an instruction
that adds two products in 16 bits; full weights would saturate the sum, and the same file
would compute other values than where it was proven.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic


def to_int8(draft: Path, path: Path, per_channel: bool, external_data: bool) -> None:
    """Write ``draft``, quantised, to ``path``; raises whatever ONNX Runtime raises."""
    model = onnx.load(draft)
    # Quantisation fails on the exporter's value_info, which contradicts the shapes it infers.
    model.graph.ClearField("value_info")
    quantize_dynamic(
        model,
        path,
        per_channel=per_channel,
        reduce_range=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=external_data,
        # Shapes are not inferred behind ONNX Runtime's own operators.
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )
