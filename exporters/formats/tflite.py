"""TensorFlow Lite: the SavedModel converted to built-in operators, run by LiteRT."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ai_edge_litert.interpreter import Interpreter

from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.loaded_model import Framework, Source
from modelport.exporters.runtime.output_capture import muted
from modelport.gateway.errors import IntegrityError, Unsupported, first_line
from modelport.gateway.repository.artifact_checks import tflite_guard
from modelport.gateway.runtime import litert_outputs
from modelport.gateway.types import Array

SIGNATURE = "serving_default"

#: The converter's message about an operator without a built-in kernel.
REFUSED = re.compile(r"'(tf\.\w+)' op is neither a custom op nor a flex op")
#: The types of such operators, and the names of those that few kernels have.
TYPES = re.compile(r"^\ttf\.\w+\((.*)$", re.MULTILINE)
DATATYPES = {"f64": "float64", "complex<f32>": "complex64", "complex<f64>": "complex128"}
#: Another message of the converter, whose rest is its internal form of the model.
FAILED = re.compile(r"'(tfl?\.\w+)' op ((?:(?!loc\(|tensor<)[^\n]){1,200})")


def export(source: Source, path: Path, target: ExportTarget) -> None:
    """Write ``source`` to ``path``; batch and axes are dynamic.

    ``fp16`` halves the weights and ``int8`` quarters them (dynamic range: activations are
    quantised at run time); arithmetic outside the quantised products stays float32, as do inputs
    and outputs.

    Raises:
        Unsupported: an operator has no built-in kernel, or the converter refuses otherwise.
    """
    from modelport.exporters.formats import built_in_graph, savedmodel
    from modelport.exporters.lowering.built_in import built_in_operators

    with (
        built_in_operators(),
        tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder,
    ):
        if source.framework is Framework.TENSORFLOW:
            source = replace(source, model=built_in_graph.rewritten(source))
        savedmodel.export(source, Path(folder), ExportTarget())
        gc.collect()  # frees the lowered model, which holds a copy of the weights
        content = _convert(Path(folder), target.precision)
    path.write_bytes(content)


def _convert(savedmodel: Path, precision: str) -> bytes:
    from modelport.exporters.runtime.output_capture import quiet
    from modelport.exporters.runtime.tensorflow_runtime import tf

    converter = tf.lite.TFLiteConverter.from_saved_model(str(savedmodel), [SIGNATURE])
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
    # Writing it would take the whole file apart and together again in Python.
    converter.exclude_conversion_metadata = True
    if precision != "fp32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if precision == "fp16":
        converter.target_spec.supported_types = [tf.float16]
    try:
        with quiet(), muted():
            content: bytes = converter.convert()
    except Exception as error:
        raise _refusal(error) from error
    return content


def _refusal(error: Exception) -> Unsupported:
    text = str(error)
    elsewhere = "use --format savedmodel"
    if refused := sorted(set(REFUSED.findall(text))):
        used = {d for line in TYPES.findall(text) for d in DATATYPES if f"{d}>" in line}
        kinds = " and ".join(sorted(DATATYPES[each] for each in used))
        return Unsupported(
            f"TensorFlow Lite has no built-in kernel for {', '.join(refused)}"
            f"{f' of {kinds}' if kinds else ''}; "
            f"{'compute in float32' if kinds else 'rewrite the model without it'}, or {elsewhere}"
        )
    found = FAILED.search(text)
    reason = f"'{found[1]}' {found[2].strip(' :')}" if found else "it gives no reason"
    return Unsupported(
        f"the TensorFlow Lite converter cannot convert this model ({reason}); {elsewhere}"
    )


class TfliteParitySession:
    """A TensorFlow Lite file in LiteRT on the CPU; inputs are bound by name and resized."""

    def __init__(self, path: Path) -> None:
        self._has_run = False
        try:
            with muted():  # "INFO: Created TensorFlow Lite XNNPACK delegate for CPU."
                interpreter = Interpreter(str(path), num_threads=os.cpu_count())
                details = interpreter.get_input_details()
                if all(-1 not in each["shape_signature"] for each in details):
                    interpreter.allocate_tensors()  # an open size is 1 before a run sets it
                self._interpreter = interpreter
                self._runner = interpreter.get_signature_runner(SIGNATURE)
        except (RuntimeError, ValueError) as error:
            reason = first_line(error)
            raise IntegrityError(
                f"'{path.name}' is not a TensorFlow Lite model with '{SIGNATURE}': {reason}"
            ) from error
        self.inputs = list(self._runner.get_input_details())
        self.outputs = list(self._runner.get_output_details())

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        # The delegate reports itself when a run first allocates tensors.
        with contextlib.nullcontext() if self._has_run else muted():
            results = litert_outputs.run(self._interpreter, self._runner, inputs)
        self._has_run = True
        return results


def open_session(path: Path, trusted: bool = False) -> TfliteParitySession:
    """Open a file; raise ``IntegrityError`` if it is damaged, unsafe or lacks the signature."""
    if not trusted:
        tflite_guard.check(path.read_bytes(), path.name)
    return TfliteParitySession(path)
