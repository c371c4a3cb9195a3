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

from modelport.exporters.formats import Target, tracing
from modelport.exporters.formats.torch_archive import seal
from modelport.exporters.formats.torch_binding import Named, TorchSession, by_position, signature_of
from modelport.exporters.output_capture import quiet
from modelport.exporters.source import Source
from modelport.exporters.sources.eager import inference_mode
from modelport.gateway.cli.errors import converter_refused
from modelport.gateway.errors import IntegrityError, ModelportError
from modelport.gateway.repository import pt2_program
from modelport.gateway.repository.load_guard import no_code
from modelport.gateway.repository.torch_archive import Archive, arguments


def export(source: Source, path: Path, target: Target) -> None:
    """Write ``source`` to ``path``.

    The program is called with the signature's inputs by name and gives its outputs by name; sizes
    outside the signature's bounds are refused by the program itself.

    Raises:
        Unsupported: the model cannot be exported.
    """
    draft = io.BytesIO()
    try:
        with quiet():
            exported = program(source, target)
            exported.example_inputs = None  # they would be stored as a pickle
            torch.export.save(exported, draft)
        seal(draft, path, source.signature)
    except (OSError, ModelportError):
        raise
    except Exception as error:
        raise converter_refused(error, "torch.export") from error


def program(source: Source, target: Target) -> ExportedProgram:
    """``source`` as a graph without anything of the machine that drew it."""
    signature = source.signature
    names = arguments(signature)
    outputs = [spec.name for spec in signature.outputs]

    def pack(results: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(outputs, results, strict=True))

    module = tracing.at_precision(source.model, target.dtype, signature)
    named = Named(module, signature, pack).eval()
    shapes = tracing.dynamic_shapes(signature, named)
    # torch would write a recurrent layer out for the example's length.
    recurrent = register_lstm_while_loop_decomposition(), register_gru_while_loop_decomposition()
    with inference_mode(named), recurrent[0], recurrent[1]:
        exported = torch.export.export(
            named,
            (),
            dict(zip(names, tracing.example_inputs(signature), strict=True)),
            dynamic_shapes=dict(zip(names, shapes, strict=True)),
            strict=False,
        )
    # Every node says which file and line it stems from.
    for graph in exported.graph_module.modules():
        if isinstance(graph, fx.GraphModule):
            for node in graph.graph.nodes:
                node.meta.pop("stack_trace", None)
    return exported


def open_session(path: Path, trusted: bool = False) -> TorchSession:
    """Load ``path``; nothing pickled in it is loaded.

    Raises:
        Unsupported: the archive names no inputs and outputs.
        IntegrityError: it is damaged, or holds pickled objects.
    """
    signature = signature_of(path)
    pt2_program.check(Archive(path), trusted)
    import torch._inductor.cpp_builder  # now: it is no part of the artifact
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
    return TorchSession(by_position(module, signature), signature)
