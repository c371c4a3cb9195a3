"""Binding of torch's positional arguments to the signature's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelport.exporters.sources.torch_eager import as_array, as_tensors
from modelport.gateway.errors import Unsupported
from modelport.gateway.repository.artifact_checks.torch_archive import Archive, arguments
from modelport.gateway.types import Array, ModelSignature


class Named(nn.Module):
    """A module whose ``forward`` has the given argument names.

    Args:
        pack: converts the tensors that the module returns.
    """

    def __init__(
        self,
        module: nn.Module,
        signature: ModelSignature,
        pack: Callable[[Sequence[Tensor]], Any],
    ) -> None:
        super().__init__()
        self.module = module
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        taken = inspect.Signature([inspect.Parameter(n, kind) for n in arguments(signature)])

        def forward(*args: Tensor, **kwargs: Tensor) -> Any:
            return pack(as_tensors(self.module(*taken.bind(*args, **kwargs).args)))

        # Tracing and export read argument names here.
        forward.__signature__ = taken  # type: ignore[attr-defined]
        self.forward = forward


class TorchParitySession:
    """A callable over tensors in the signature's order, as a session over named arrays."""

    def __init__(self, run: Callable[..., Any], signature: ModelSignature) -> None:
        self._run = run
        self.inputs = [spec.name for spec in signature.inputs]
        self.outputs = [spec.name for spec in signature.outputs]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        tensors = [torch.tensor(inputs[name]) for name in self.inputs]
        with torch.no_grad():
            results = as_tensors(self._run(*tensors))
        return {name: as_array(x) for name, x in zip(self.outputs, results, strict=True)}


def by_position(run: Callable[..., Mapping[str, Tensor]], signature: ModelSignature) -> Any:
    """Wrap ``run``, which uses names, for ``TorchParitySession``, which uses positions."""
    names = arguments(signature)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = run(**dict(zip(names, tensors, strict=True)))
        return tuple(results[spec.name] for spec in signature.outputs)

    return call


def signature_of(path: Path) -> ModelSignature:
    """Read the signature in an archive.

    Raises:
        Unsupported: the archive has none.
        IntegrityError: the archive is damaged.
    """
    signature = Archive(path).signature()
    if signature is None:
        raise Unsupported(
            f"'{path.name}' does not name its inputs and outputs; export the model with modelport"
        )
    return signature
