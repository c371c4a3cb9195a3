"""PyTorch in eager mode: what every artifact of a module is held against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from exporters.errors import UsageError
from gateway.errors import Unsupported
from gateway.types import Array, ModelSignature


@contextlib.contextmanager
def inference_mode(module: nn.Module) -> Iterator[None]:
    """``eval()``, no gradients, and no fused encoder path: it has no counterpart in any format."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


class Eager:
    """A module called with arrays by name."""

    def __init__(self, module: nn.Module, signature: ModelSignature) -> None:
        self._module = module
        self._inputs = [spec.name for spec in signature.inputs]
        self._outputs = [spec.name for spec in signature.outputs]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Raises ``Unsupported`` or ``UsageError`` where the result is not what was declared."""
        tensors = [torch.tensor(inputs[name]) for name in self._inputs]
        with inference_mode(self._module):
            results = as_tensors(self._module(*tensors))
        if len(results) != len(self._outputs):
            raise UsageError(
                f"forward() returns {len(results)} tensors, the signature declares "
                f"{len(self._outputs)} outputs; declare each"
            )
        arrays = (value.numpy() for value in results)
        return dict(zip(self._outputs, arrays, strict=True))


def as_tensors(result: object) -> Sequence[torch.Tensor]:
    """What ``forward`` returned, as a sequence.

    Raises:
        Unsupported: it is something else than a tensor or a sequence of tensors.
    """
    results = (result,) if isinstance(result, torch.Tensor) else result
    if not isinstance(results, tuple | list) or not all(
        isinstance(value, torch.Tensor) for value in results
    ):
        raise Unsupported(
            f"forward() returns a {type(result).__name__}; return a tensor, or a tuple of tensors "
            "in the order of the signature's outputs"
        )
    return results
