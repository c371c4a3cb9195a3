"""Quantisation of ONNX files: dynamic, static, or of weights alone.

Every function writes ``draft``, quantised, to ``path``, and raises whatever ONNX Runtime raises.

int8 weights of the first two use seven of the eight bits. Processors without VNNI multiply with an
instruction that adds two products in 16 bits; full weights would saturate the sum, and the same
file would compute other values than where it was proven.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import (
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quant_pre_process,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)
from onnxruntime.quantization.onnx_model import ONNXModel

from modelport.exporters.formats import onnx_opsets
from modelport.exporters.optimization.calibration import BatchReader, CalibrationData

METHODS = {
    "minmax": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}
#: Bits of weights, by name of ``--quantize``.
BITS = {"int4": 4, "int8-weight-only": 8}
#: ONNX Runtime's ``accuracy_level`` that multiplies in int8. In float32, 8 bits are several times
#: slower than weights that are not quantised, and the error is nearly the same.
INT8_ARITHMETIC = 4
#: Shapes are not inferred behind ONNX Runtime's own operators.
_FLOATS = {"DefaultTensorType": onnx.TensorProto.FLOAT}


def to_dynamic_int8(draft: Path, path: Path, per_channel: bool, external_data: bool) -> None:
    """Quantise weights; activations are quantised at run time."""
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
        extra_options=_FLOATS,
    )


def to_static_int8(
    draft: Path,
    path: Path,
    data: CalibrationData,
    method: str,
    per_channel: bool,
    external_data: bool,
) -> None:
    """Quantise weights and activations, as QuantizeLinear pairs, by the ranges in ``data``."""
    with tempfile.TemporaryDirectory(dir=draft.parent) as folder:
        prepared = Path(folder) / draft.name
        quant_pre_process(
            draft,
            prepared,
            auto_merge=True,
            save_as_external_data=external_data,
            all_tensors_to_one_file=True,
        )
        quantize_static(
            prepared,
            path,
            BatchReader(data),
            quant_format=QuantFormat.QDQ,
            per_channel=per_channel,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            use_external_data_format=external_data,
            calibrate_method=METHODS[method],
            # Batch by batch: activations of all batches at once may be gigabytes.
            extra_options={"CalibStridedMinMax": 1, **_FLOATS},
        )


def to_blocks(draft: Path, path: Path, bits: int, block_size: int, external_data: bool) -> None:
    """Quantise matrices in blocks that share a scale, for models whose time goes into reading them.

    4 bits include embeddings, which ONNX Runtime has no 8-bit operator for.
    """
    model = ONNXModel(onnx.load(draft))
    model.replace_gemm_with_matmul()
    kinds = (
        ("MatMul", "Gather")
        if bits == 4 and _opset(model.model) >= onnx_opsets.INT4
        else ("MatMul",)
    )
    quantizer = MatMulNBitsQuantizer(
        model.model,
        nodes_to_exclude=_other_gathers(model.model.graph),
        algo_config=DefaultWeightOnlyQuantConfig(
            block_size=block_size,
            is_symmetric=True,
            accuracy_level=INT8_ARITHMETIC,
            op_types_to_quantize=kinds,
            bits=bits,
        ),
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(path), external_data)


def _opset(model: onnx.ModelProto) -> int:
    own = (entry for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    return max(int(entry.version) for entry in own)


def _other_gathers(graph: Any) -> list[str]:
    """Names of the nodes that look up something else than a row of a matrix of floats."""
    tables = {
        tensor.name
        for tensor in graph.initializer
        if len(tensor.dims) == 2 and tensor.data_type == onnx.TensorProto.FLOAT
    }
    names = []
    for number, node in enumerate(graph.node):
        if node.op_type == "Gather" and node.input[0] not in tables:
            node.name = node.name or f"gather_{number}"
            names.append(node.name)
    return names
