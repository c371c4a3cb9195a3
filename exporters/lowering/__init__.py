"""PyTorch to TensorFlow: an interpreter of ``torch.export`` programs inside a ``tf.function``.

``lower`` exports a module with symbolic sizes, decomposes it into the operators of a table, and
runs these one by one with TensorFlow's tensors. Sizes that are not static are read from the tensors
at run time; weights are variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.loaded_model import Source
from modelport.exporters.lowering.interpreter import Interpreter
from modelport.exporters.lowering.program import lowerable_program
from modelport.gateway.repository.artifact_checks.torch_archive import arguments


def lower(source: Source, target: ExportTarget) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A PyTorch model as a function of TensorFlow's tensors by name.

    Raises:
        Unsupported: PyTorch cannot export the model, or the table lacks one of its operators.
    """
    signature = source.signature
    interpreter = Interpreter(lowerable_program(source, target))
    names = dict(zip(arguments(signature), (spec.name for spec in signature.inputs), strict=True))
    outputs = [spec.name for spec in signature.outputs]

    def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
        given = [inputs[names[argument]] for argument in interpreter.inputs]
        return dict(zip(outputs, interpreter(*given), strict=True))

    return run
