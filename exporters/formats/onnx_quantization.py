"""int8 quantisation of ONNX files: dynamic, one scale per output channel.

Weights use seven of the eight bits. Processors without VNNI multiply with an instruction
that adds two products in 16 bits; full weights would saturate the sum, and the same file
would compute other values than where it was proven.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic

from modelport.exporters.runtime.output_capture import quiet
from modelport.gateway.cli.errors import converter_refused


def to_int8(path: Path, external_data: bool) -> None:
    """Quantise the ONNX file at ``path`` in place.

    Activations are quantised at run time, so no calibration data is needed.

    Raises:
        Unsupported: ONNX Runtime cannot quantise this graph.
    """
    model = onnx.load(path)
    # Quantisation fails on the exporter's value_info, which contradicts the shapes it infers.
    model.graph.ClearField("value_info")
    path.with_name(path.name + ".data").unlink(missing_ok=True)
    try:
        with quiet():
            quantize_dynamic(
                model,
                path,
                per_channel=True,
                reduce_range=True,
                weight_type=QuantType.QInt8,
                use_external_data_format=external_data,
            )
    except OSError:
        raise
    except Exception as error:
        raise converter_refused(error, "onnxruntime.quantization") from error
