"""Any framework to OpenVINO IR, ``model.xml`` with ``model.bin``, by way of ONNX."""

from __future__ import annotations

import importlib
import tempfile
from dataclasses import replace
from pathlib import Path

from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import find_format
from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import muted
from modelport.gateway.errors import Unsupported
from modelport.gateway.runtime.openvino_import import openvino
from modelport.gateway.types import Datatype

#: OpenVINO computes it in 32 bits.
UNSUPPORTED = (Datatype.FP64,)


def export(source: Source, path: Path, target: ExportTarget) -> None:
    """Write ``source`` to ``path``, and its weights beside it; batch and axes are dynamic.

    ``fp16`` halves the weights; arithmetic stays float32, as do inputs and outputs.

    Raises:
        Unsupported: an operator has no conversion.
    """
    for spec in (*source.signature.inputs, *source.signature.outputs):
        if spec.datatype in UNSUPPORTED:
            raise Unsupported(
                f"'{spec.name}' is {spec.datatype}, which OpenVINO computes in 32 bits; use "
                "--format onnx"
            )
    route = find_format("onnx").routes[source.framework]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        draft = Path(folder) / "model.onnx"
        exact = replace(target, dtype="fp32", opset=route.default_opset)
        importlib.import_module(route.module).export(source, draft, exact)
        from_onnx(draft, path, target.dtype == "fp16")


def from_onnx(draft: Path, path: Path, half: bool) -> None:
    """Convert the ONNX file ``draft``; ``half`` stores weights in fp16.

    Raises:
        Unsupported: OpenVINO lacks an operator.
    """
    try:
        with muted():
            # Not convert_model(), which would report its use to its makers.
            model = openvino.Core().read_model(draft)
            openvino.save_model(model, path, compress_to_fp16=half)
    except Exception as error:
        reason = str(error).strip().splitlines()[-1].strip()[:300]
        raise Unsupported(
            f"OpenVINO cannot convert this model ({reason}); use --format onnx"
        ) from error
