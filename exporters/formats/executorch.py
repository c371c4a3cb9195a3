"""PyTorch to ExecuTorch's ``.pte``, with XNNPACK's kernels where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from modelport.exporters.formats import pt2
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import muted, quiet
from modelport.exporters.sources import torch_errors
from modelport.gateway.errors import IntegrityError, Unsupported, first_line
from modelport.gateway.types import Array

METHOD = "forward"
#: Methods of the program that return the names of its inputs and outputs, separated by commas.
INPUTS, OUTPUTS = "modelport_inputs", "modelport_outputs"


def export(source: Source, path: Path, target: ExportTarget) -> None:
    """Write ``source`` to ``path``; sizes are bounded by the signature, which plans the memory.

    Raises:
        Unsupported: the model cannot be exported or lowered.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    names = {
        INPUTS: ",".join(spec.name for spec in source.signature.inputs),
        OUTPUTS: ",".join(spec.name for spec in source.signature.outputs),
    }
    with torch_errors.translated("executorch"):
        with quiet(), muted():
            program = pt2.program(source, target)
            edge = to_edge_transform_and_lower(
                program, partitioner=[XnnpackPartitioner()], constant_methods=names
            )
            content = edge.to_executorch().buffer
        path.write_bytes(content)


class ExecutorchParitySession:
    """A program in ExecuTorch's runtime."""

    def __init__(self, path: Path) -> None:
        with quiet(), muted():
            from executorch.runtime import Runtime, Verification

            try:
                program = Runtime.get().load_program(
                    path, verification=Verification.InternalConsistency
                )
                self.inputs, self.outputs = (
                    program.load_method(name).execute([])[0].split(",")
                    for name in (INPUTS, OUTPUTS)
                )
                self._method: Any = program.load_method(METHOD)
            except Exception as error:
                raise IntegrityError(
                    f"'{path.name}' is damaged, or not exported by modelport ({first_line(error)})"
                ) from error

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        tensors = [torch.tensor(inputs[name]) for name in self.inputs]
        results = self._method.execute(tensors)  # in memory that the next call writes
        return {
            name: value.numpy().copy() for name, value in zip(self.outputs, results, strict=True)
        }


def open_session(path: Path, trusted: bool = False) -> ExecutorchParitySession:
    """Open a program; an instruction may address any memory, so it has to be trusted.

    Raises:
        Unsupported: it is not trusted.
        IntegrityError: it is damaged.
    """
    if not trusted:
        raise Unsupported(
            f"'{path.name}' runs native code; check its signature with --public-key, or trust it "
            "with --trust"
        )
    return ExecutorchParitySession(path)
