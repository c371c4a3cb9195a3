"""Weights in blocks of 4 or 8 bits that share a scale, for language models, whose time goes into
reading weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)
from onnxruntime.quantization.onnx_model import ONNXModel

from modelport.exporters.formats import onnx_opsets

#: By name of ``--quantize``.
BITS = {"int4": 4, "int8-weight-only": 8}
#: ONNX Runtime's ``accuracy_level`` that multiplies in int8. In float32, 8 bits are several times
#: slower than weights that are not quantised, and the error is nearly the same.
INT8_ARITHMETIC = 4


def quantize(draft: Path, path: Path, bits: int, block_size: int, external_data: bool) -> None:
    """Write ``draft``, its matrices quantised, to ``path``; raises whatever ONNX Runtime raises.

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
