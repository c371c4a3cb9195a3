"""A module as trained, made ready for tracing: not compiled, not parametrised, not quantised."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.nn.utils import parametrize

from modelport.gateway.errors import Unsupported

COMPILED = "_orig_mod"
#: Packages of modules with quantised weights, and of tensors that hold them.
QUANTISED_PACKAGES = (
    "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic.quantized",
    "torch.nn.quantized",
    "torchao.",
    "bitsandbytes.",
    "auto_gptq.",
    "awq.",
)

#: The module of a hook that computes a weight before each call, and what removes it.
HOOKS: Mapping[str, Callable[[nn.Module, str], nn.Module]] = {
    "torch.nn.utils.weight_norm": nn.utils.remove_weight_norm,
    "torch.nn.utils.spectral_norm": nn.utils.remove_spectral_norm,
}


@contextlib.contextmanager
def unscripted() -> Iterator[None]:
    """Leave modules and functions as they are where code calls ``torch.jit.script`` or
    ``torch.jit.trace``, as ``PYTORCH_JIT=0`` does: what they return cannot be traced."""
    enabled = torch.jit._state._enabled
    before, enabled.enabled = enabled.enabled, False
    try:
        yield
    finally:
        enabled.enabled = before


def uncompiled(module: nn.Module) -> nn.Module:
    """``module`` without ``torch.compile``, which changes no value but cannot be traced."""
    module = getattr(module, COMPILED, module)
    for part in list(module.modules()):
        part._compiled_call_impl = None  # nn.Module.compile()
        for name, child in list(part._modules.items()):
            inner = getattr(child, COMPILED, None)
            if isinstance(inner, nn.Module):
                part._modules[name] = inner
    return module


def without_parametrizations(module: nn.Module) -> None:
    """Replace weights that are computed from others (``weight_norm``) by their values."""
    for part in module.modules():
        if parametrize.is_parametrized(part):
            for name in list(part.parametrizations):  # type: ignore[arg-type]
                with torch.no_grad():
                    parametrize.remove_parametrizations(part, name, leave_parametrized=True)
        for hook in list(part._forward_pre_hooks.values()):
            if type(hook).__module__ in HOOKS:
                # A weight normalisation of the older kind is a hook that computes before each call.
                remove = HOOKS[type(hook).__module__]
                with warnings.catch_warnings(action="ignore"), contextlib.suppress(ValueError):
                    remove(part, getattr(hook, "name", "weight"))


def check_not_quantised(module: nn.Module) -> None:
    """Raise ``Unsupported`` if the weights are quantised already.

    The kernels of quantised modules have no counterpart in any format.
    """
    for name, part in module.named_modules():
        kinds = [type(part), *(type(tensor) for tensor in part._parameters.values())]
        tensors = (*part._parameters.values(), *part._buffers.values())
        quantised = any(kind.__module__.startswith(QUANTISED_PACKAGES) for kind in kinds)
        if quantised or any(x is not None and x.is_quantized for x in tensors):
            raise Unsupported(
                f"'{name or type(part).__name__}' is a quantised {type(part).__name__}, whose "
                "kernels no format supports; export the model before quantisation, with --quantize "
                "int8 if it is to be quantised"
            )
