"""The usual time of a conversion, for the progress of a command."""

from __future__ import annotations

from collections.abc import Mapping

from modelport.exporters.loaded_model import Source

#: Seconds on two cores: for any model, and for each million of its parameters; ``make table``
#: measures them.
SECONDS: Mapping[str, tuple[float, float]] = {
    "onnx": (4, 0.085),
    "torchscript": (1, 0.04),
    "savedmodel": (3, 0.04),
    "tflite": (4, 0.2),
    "openvino": (5, 0.1),
    "pt2": (2, 0.04),
    "aoti": (15, 0.14),
    "executorch": (5, 0.1),
}


def stage(format_name: str, source: Source) -> str:
    """The name of the stage, with the seconds that it usually takes where they are known."""
    if format_name not in SECONDS:
        return "converting"
    whole, each = SECONDS[format_name]
    return f"converting, usually {whole + each * source.parameter_count / 1e6:.0f} s"
