"""PyTorch to ``torch.export``'s ``.pt2``: a graph of ATen operators with its weights."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export._patches import (
    register_gru_while_loop_decomposition,
    register_lstm_while_loop_decomposition,
)
from torch.fx.experimental import _config as symbolic_sizes

from modelport.exporters.formats import open_loops, open_sizes, tracing
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.torch_archive import seal
from modelport.exporters.formats.torch_binding import (
    Named,
    TorchParitySession,
    by_position,
    signature_of,
)
from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import torch_errors
from modelport.exporters.sources.torch_eager import inference_mode
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
    with torch_errors.translated("torch.export"):
        with quiet():
            exported = program(source, target)
            exported.example_inputs = None  # torch would store them as a pickle
            torch.export.save(exported, draft)
        seal(draft, path, source.signature)


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
    examples = dict(zip(names, tracing.example_inputs(signature, source.spec.masks), strict=True))
    with inference_mode(named), open_sizes.kept_by(named), recurrent_layers():
        declared = dict(zip(names, shapes, strict=True))
        try:
            return torch.export.export(named, (), examples, dynamic_shapes=declared, strict=False)
        except Exception:
            auto = {n: dict.fromkeys(s, torch.export.Dim.AUTO) for n, s in declared.items()}
            for sizes in (declared, auto):
                program = _with_assertions(named, examples, sizes, declared)
                if program is not None:
                    return program
            raise


@contextlib.contextmanager
def recurrent_layers() -> Iterator[None]:
    """Keep the length of recurrent layers open; torch would fix the example's."""
    operators = torch.ops.aten.lstm.input, torch.ops.aten.gru.input
    try:
        for each in operators:  # an earlier export has left what it ran instead
            each._dispatch_cache.clear()
        with register_lstm_while_loop_decomposition(), register_gru_while_loop_decomposition():
            yield
    finally:
        for each in operators:
            each._dispatch_cache.clear()


def _with_assertions(
    module: nn.Module,
    examples: Mapping[str, Tensor],
    sizes: Mapping[str, Any],
    declared: Mapping[str, Any],
) -> ExportedProgram | None:
    """Export with assertions in the program in place of guards; None unless its sizes hold all that
    are declared.

    Code that asks for a size, as masks of attention do, passes so more often; and nothing then sets
    a size of 1, which broadcasts, apart from larger ones, so that the shortest input may make an
    inner size 1.
    """
    try:
        with symbolic_sizes.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            program = torch.export.export(
                module,
                (),
                dict(examples),
                dynamic_shapes=dict(sizes),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except (Exception, open_loops.OpenLoop):
        return None
    inputs = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    kept = all(
        _admits(program, inputs[name].shape[dim], size)
        for name, shape in declared.items()
        for dim, size in shape.items()
    )
    if not kept:
        return None
    for pick in ("min", "max"):
        ends = {
            inputs[name].shape[dim].node.expr: getattr(size, pick)
            for name, shape in declared.items()
            for dim, size in shape.items()
        }
        _drop_refuted(program, ends)
    return program


def _drop_refuted(program: ExportedProgram, sizes: Mapping[Any, int]) -> None:
    """Remove assertions that fail at ``sizes``, which the model accepts.

    PyTorch asserts that an inner size of the example, such as one above 1, is so for all inputs.
    The proof runs the program at these sizes, and decides if it is right there.
    """
    for graph in program.graph_module.modules():
        if not isinstance(graph, fx.GraphModule):
            continue
        for node in graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten._assert_scalar.default
        ):
            claim = getattr(getattr(node.args[0].meta.get("val"), "node", None), "expr", None)
            if claim is not None and claim.xreplace(sizes) == sympy.false:
                graph.graph.erase_node(node)
        graph.graph.eliminate_dead_code()


def _admits(program: ExportedProgram, found: Any, declared: Any) -> bool:
    """Whether the size ``found`` in ``program`` may be each that is ``declared``."""
    if not isinstance(found, torch.SymInt):
        return False
    bounds = program.range_constraints.get(found.node.expr)
    # PyTorch takes 0 and 1 for constants, so that bounds that it finds begin at 2.
    return bounds is None or bool(
        bounds.lower <= max(2, declared.min) and bounds.upper >= declared.max
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
            f"'{path.name}' is damaged, or from another version of torch; export the model again"
        ) from error
    return TorchParitySession(by_position(module, signature), signature)
