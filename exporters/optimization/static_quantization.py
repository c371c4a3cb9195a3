"""Static int8 quantisation of ONNX files: weights and activations, as QuantizeLinear pairs.

The ranges of activations come from calibration data. Weights use seven of the eight bits, for the
reason in ``dynamic_quantization``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
from onnxruntime.quantization import (
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quant_pre_process,
    quantize_static,
)

from modelport.exporters.optimization.calibration import BatchReader, CalibrationData

METHODS = {
    "minmax": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}


def to_int8(
    draft: Path,
    path: Path,
    data: CalibrationData,
    method: str,
    per_channel: bool,
    external_data: bool,
) -> None:
    """Write ``draft``, quantised, to ``path``; raises whatever ONNX Runtime raises."""
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
            extra_options={
                # Batch by batch: activations of all batches at once may be gigabytes.
                "CalibStridedMinMax": 1,
                # Shapes are not inferred behind ONNX Runtime's own operators.
                "DefaultTensorType": onnx.TensorProto.FLOAT,
            },
        )
