"""PyTorch to TorchScript: traced, frozen, with the signature inside the archive."""

from __future__ import annotations

import contextlib
import io
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import TracingContext

from modelport.exporters.formats import tracing
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.torch_archive import seal
from modelport.exporters.formats.torch_binding import Named, TorchParitySession, signature_of
from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import torch_errors
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository.artifact_checks import torchscript_guard, trial_load
from modelport.gateway.repository.artifact_checks.load_guard import no_code
from modelport.gateway.repository.artifact_checks.torch_archive import Archive

#: Source lines of operators for stack traces, with the exporting machine's paths.
DEBUG_RECORDS = (".debug_pkl",)
#: TorchScript is compiled for the inputs of its first runs, on the run after them.
RUNS_TO_COMPILE = 3


def export(source: Source, path: Path, target: ExportTarget) -> None:
    """Write ``source`` to ``path``.

    ``forward`` takes the signature's inputs by name, in its order, and returns one tensor, or a
    tuple in the order of the outputs. Sizes stay dynamic, unless the module itself turns one into a
    number: tracing then silently bakes in the example's, and the proof fails.

    Raises:
        Unsupported: the model cannot be traced.
    """
    signature = source.signature
    with torch_errors.translated("torch.jit.trace"):
        with quiet():
            module = tracing.at_precision(source.model, target.dtype, signature)
            named = Named(module, signature, _pack).eval()
            with inference_mode(named), _forward_alone(), _nothing_compiled():
                traced = torch.jit.trace(  # type: ignore[no-untyped-call]
                    named,
                    tracing.example_inputs(signature, source.spec.masks),
                    check_trace=False,  # the proof compares on more than one example
                )
                draft = torch.jit.freeze(traced).save_to_buffer()
        seal(io.BytesIO(draft), path, signature, without=DEBUG_RECORDS)


@contextlib.contextmanager
def _forward_alone() -> Iterator[None]:
    """Run ``forward`` of custom autograd functions itself, since no archive can hold a call of
    Python."""
    function = torch.autograd.Function
    ordinary = vars(function)["apply"]

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if kind.setup_context is not function.setup_context:  # then forward takes no context
            return kind.forward(*args, **kwargs)
        return kind.forward(WithoutGradients(), *args, **kwargs)

    function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        function.apply = ordinary  # type: ignore[method-assign]


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Trace through ``torch.compile`` and ``torch.jit.export``, as if they were not there.

    ``torch.compile`` refuses to be traced, except below a kernel of fake tensors, where it is not
    applied. The tracer would compile the methods that ``torch.jit.export`` marks, which nobody
    calls in an artifact.
    """
    kernel = types.SimpleNamespace(in_kernel_invocation=True, shape_env=None)
    context = TracingContext(cast(Any, kernel))
    has_exports = torch._jit_internal.module_has_exports
    torch._jit_internal.module_has_exports = lambda mod: False
    try:
        with torch._guards.tracing(context):
            yield
    finally:
        torch._jit_internal.module_has_exports = has_exports


class WithoutGradients:
    """The context of a custom autograd function that nobody differentiates."""

    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save nothing."""

    save_for_forward = mark_dirty = mark_non_differentiable = save_for_backward

    def set_materialize_grads(self, value: bool) -> None:
        """Ignore it."""


def _pack(results: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    return results[0] if len(results) == 1 else tuple(results)


def open_session(path: Path, trusted: bool = False) -> TorchParitySession:
    """Load ``path`` onto the CPU.

    Raises:
        Unsupported: the archive names no inputs and outputs.
        IntegrityError: it is damaged.
    """
    if not trusted:
        torchscript_guard.check_archive(Archive(path))
        trial_load.run(f"{__name__}:try_session", path)
    return _open_session(path, trusted)


def try_session(path: Path) -> None:
    """Open an archive that passed the checks, and run it until it is compiled."""
    session = _open_session(path, trusted=False)
    examples = tracing.example_inputs(signature_of(path))
    inputs = {name: x.numpy() for name, x in zip(session.inputs, examples, strict=True)}
    for _ in range(RUNS_TO_COMPILE):
        session(inputs)


def _open_session(path: Path, trusted: bool) -> TorchParitySession:
    signature = signature_of(path)
    try:
        with quiet(), no_code(path.name):
            module, functions = torchscript_guard.load(path)
    except RuntimeError as error:
        raise IntegrityError(
            f"'{path.name}' is damaged, or from another version of torch; export the model again"
        ) from error
    if not trusted:
        torchscript_guard.check_operators(module, functions, path.name)
    return TorchParitySession(module, signature)
