"""PyTorch to TensorFlow: an interpreter of ``torch.export`` programs inside a ``tf.function``.

``program.prepared`` decomposes a program into the operators of a table; ``lower`` runs these one by
one with TensorFlow's tensors. Sizes that are not static are read from the tensors at run time;
weights are variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.export import ExportedProgram

from modelport.exporters.lowering.interpreter import Interpreter
from modelport.exporters.lowering.program import check_operators
from modelport.gateway.types import ModelSignature


def lower(
    program: ExportedProgram, signature: ModelSignature
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A prepared program as a function of TensorFlow's tensors by name.

    Raises:
        Unsupported: the table lacks one of its operators.
    """
    check_operators(program)
    interpreter = Interpreter(program)
    # A graph has its arguments' names in small letters, but in their order.
    names = [spec.name for spec in signature.inputs]
    outputs = [spec.name for spec in signature.outputs]

    def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
        given = [inputs[name] for name in names]
        return dict(zip(outputs, interpreter(*given), strict=True))

    return run
