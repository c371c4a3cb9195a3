"""PyTorch in eager mode, the reference for every artifact of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from modelport.gateway.cli.errors import UsageError
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, ModelSignature

#: Published datatypes; a bfloat16 is published as the float32 of the same value.
DATATYPES: Mapping[torch.dtype, Datatype] = {
    torch.bfloat16: Datatype.FP32,
    **{
        torch.from_numpy(np.empty(0, dtype)).dtype: datatype
        for datatype, dtype in NUMPY_DTYPES.items()
        if datatype not in (Datatype.BF16, Datatype.BYTES)
    },
}


@contextlib.contextmanager
def inference_mode(module: nn.Module) -> Iterator[None]:
    """``eval()``, no gradients, and no fused encoder path, which no format has."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


class TorchEager:
    """A module called with arrays by name."""

    def __init__(self, module: nn.Module, signature: ModelSignature) -> None:
        self._module = module
        self._inputs = [spec.name for spec in signature.inputs]
        self._outputs = [spec.name for spec in signature.outputs]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the module; raise ``Unsupported`` or ``UsageError`` if the result is not as
        declared."""
        tensors = [torch.tensor(inputs[name]) for name in self._inputs]
        with inference_mode(self._module):
            results = as_tensors(self._module(*tensors))
        if len(results) != len(self._outputs):
            raise UsageError(
                f"forward() returns {len(results)} tensors, the signature declares "
                f"{len(self._outputs)} outputs; declare each"
            )
        for name, value in zip(self._outputs, results, strict=True):
            datatype_of(name, value)
        return {name: x.numpy() for name, x in zip(self._outputs, results, strict=True)}


class Widened(nn.Module):
    """A module with bfloat16 results as float32, which holds all of their values."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = as_tensors(self.module(*inputs))
        return tuple(x.float() if x.dtype is torch.bfloat16 else x for x in results)


def widen_weights(module: nn.Module) -> None:
    """Convert bfloat16 weights to float32; ``--dtype`` sets the artifact's precision."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype is torch.bfloat16:
            tensor.data = tensor.data.float()


def datatype_of(name: str, value: Tensor) -> Datatype:
    """The published datatype of the output ``name``.

    Raises:
        Unsupported: no protocol has it.
    """
    if value.dtype not in DATATYPES or value.layout is not torch.strided:
        kind = value.dtype if value.layout is torch.strided else value.layout
        raise Unsupported(
            f"output '{name}' is {kind}, which no protocol has; return dense tensors of floats, "
            "integers or booleans"
        )
    return DATATYPES[value.dtype]


def as_tensors(result: object) -> Sequence[torch.Tensor]:
    """The result of ``forward`` as a sequence.

    Raises:
        Unsupported: it is neither a tensor nor a sequence of tensors.
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
