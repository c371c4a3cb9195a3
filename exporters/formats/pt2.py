"""PyTorch to ``torch.export``'s ``.pt2``: a graph of ATen operators with its weights."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export._patches import (
    register_gru_while_loop_decomposition,
    register_lstm_while_loop_decomposition,
)

from modelport.exporters.formats import ExportTarget, tracing
from modelport.exporters.formats.torch_archive import seal
from modelport.exporters.formats.torch_binding import (
    Named,
    TorchParitySession,
    by_position,
    signature_of,
)
from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.gateway.cli.errors import converter_refused
from modelport.gateway.errors import IntegrityError, ModelportError
from modelport.gateway.repository.artifact_checks import pt2_guard
from modelport.gateway.repository.artifact_checks.load_guard import no_code
from modelport.gateway.repository.artifact_checks.torch_archive import Archive, arguments


def export(source: Source, path: Path, target: ExportTarget) -> None:
    """Write ``source`` to ``path``.

    The program takes the signature's inputs by name and returns its outputs by name; sizes
    outside the signature's bounds are refused by the program itself.

    Raises:
        Unsupported: the model cannot be exported.
    """
    draft = io.BytesIO()
    try:
        with quiet():
            exported = program(source, target)
            exported.example_inputs = None  # torch would store them as a pickle
            torch.export.save(exported, draft)
        seal(draft, path, source.signature)
    except (OSError, ModelportError):
        raise
    except Exception as error:
        raise converter_refused(error, "torch.export") from error


def program(source: Source, target: ExportTarget) -> ExportedProgram:
    """Export ``source`` as a graph without traces of the exporting machine."""
    exported = traced_program(source, target)
    # Every node records the source file and line it stems from.
    for graph in exported.graph_module.modules():
        if isinstance(graph, fx.GraphModule):
            for node in graph.graph.nodes:
                node.meta.pop("stack_trace", None)
    return exported


def traced_program(source: Source, target: ExportTarget) -> ExportedProgram:
    """Export ``source`` as a graph whose nodes know the lines of code they stem from."""
    signature = source.signature
    names = arguments(signature)
    outputs = [spec.name for spec in signature.outputs]

    def pack(results: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(outputs, results, strict=True))

    module = tracing.at_precision(source.model, target.dtype, signature)
    named = Named(module, signature, pack).eval()
    shapes = tracing.dynamic_shapes(signature, named)
    # What earlier exports compiled, while loops above all, would fix sizes of this one.
    torch.compiler.reset()
    # torch would unroll a recurrent layer to the example's length.
    recurrent = register_lstm_while_loop_decomposition(), register_gru_while_loop_decomposition()
    with inference_mode(named), recurrent[0], recurrent[1]:
        return torch.export.export(
            named,
            (),
            dict(zip(names, tracing.example_inputs(signature, source.spec.masks), strict=True)),
            dynamic_shapes=dict(zip(names, shapes, strict=True)),
            strict=False,
        )


def open_session(path: Path, trusted: bool = False) -> TorchParitySession:
    """Load ``path``; pickled objects in it are not loaded.

    Raises:
        Unsupported: the archive names no inputs and outputs.
        IntegrityError: the file is damaged, or holds pickled objects.
    """
    signature = signature_of(path)
    pt2_guard.check(Archive(path), trusted)
    # import now, so that its code is not taken for part of the artifact
    import torch._inductor.cpp_builder
    import torch.export.pt2_archive._package

    try:
        with quiet(), no_code(path.name):
            module = torch.export.load(path).module()
    except ModelportError:
        raise
    except Exception as error:
        raise IntegrityError(
            f"'{path.name}' is damaged, or of another version of torch; export the model again"
        ) from error
    return TorchParitySession(by_position(module, signature), signature)
