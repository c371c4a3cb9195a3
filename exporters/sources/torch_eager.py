"""PyTorch in eager mode, the reference for every artifact of a module."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._higher_order_ops import utils as higher_order
from torch.masked import is_masked_tensor
from torch.utils._pytree import tree_leaves, tree_map

from modelport.exporters.runtime.output_capture import quiet
from modelport.gateway.errors import Unsupported, UsageError
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

#: Containers within containers, as deep as a result may hold its tensors.
MOST_LEVELS = 64

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@contextlib.contextmanager
def inference_mode(module: nn.Module) -> Iterator[None]:
    """``eval()``, no gradients, no ``torch.compile``, which changes no value, no fused encoder
    path, which no format has, and no output of the module's own."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    module.eval()
    try:
        with quiet(), torch.no_grad(), _uncompiled():
            yield
    except SystemExit as error:
        raise RuntimeError(f"the model ends the process, exit({error.code})") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run what ``torch.compile`` decorates as it was; all of that has imported torch._dynamo.

    Exports compile branches and loops of torch (``torch.cond``) all the same: that is how their
    functions become graphs.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    compiled: Any = higher_order._hop_compile_and_call

    def call(function: Any, args: Any, *rest: Any) -> Any:
        if function.__name__ == "run_flattened_scan" and not torch.compiler.is_exporting():
            return _scanned(*args)
        stance = "default" if torch.compiler.is_exporting() else "force_eager"
        with torch.compiler.set_stance(stance):
            return compiled(function, args, *rest)

    higher_order._hop_compile_and_call = call
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        higher_order._hop_compile_and_call = compiled


def _scanned(step: Any, carry: Any, xs: Sequence[Tensor]) -> tuple[Any, Any]:
    """The final state and the stacked results; torch 2.13 joins them to one list uncompiled."""
    results = []
    for elements in zip(*xs, strict=True):
        carry, result = step(*tree_leaves(carry), *elements)
        results.append(result)
    return carry, tree_map(lambda *each: torch.stack(each), *results)


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
                f"forward() returns {len(results)} tensors, but the signature declares "
                f"{len(self._outputs)} outputs; declare each"
            )
        for name, value in zip(self._outputs, results, strict=True):
            datatype_of(name, value)
        return {name: as_array(x) for name, x in zip(self._outputs, results, strict=True)}


class Adapted(nn.Module):
    """A module that takes its inputs in order and returns a flat tuple, as every format does.

    bfloat16 results are returned as float32, which holds all of their values.

    Args:
        keywords: names of the arguments to pass the inputs as; None: in order.
        outputs: names of the results to return, as ``named_tensors`` gives them; None: all.
    """

    def __init__(
        self,
        module: nn.Module,
        keywords: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._keywords = None if keywords is None else tuple(keywords)
        self._chosen = None if outputs is None else tuple(outputs)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = named_tensors(call(self.module, inputs, self._keywords), self._chosen or ())
        results = found.values() if self._chosen is None else [found[n] for n in self._chosen]
        return tuple(x.float() if x.dtype is torch.bfloat16 else x for x in results)


def is_scripted(module: nn.Module) -> bool:
    """Whether ``torch.jit`` has compiled the module, or its ``forward``."""
    return isinstance(module, torch.jit.ScriptModule) or isinstance(
        vars(module).get("forward"), torch._C.ScriptMethod
    )


def call(module: nn.Module, inputs: Sequence[Tensor], keywords: Sequence[str] | None) -> Any:
    """Call ``module`` with ``inputs`` in order, or by ``keywords``."""
    if keywords is None:
        return module(*inputs)
    return module(**dict(zip(keywords, inputs, strict=True)))


def keywords_of(module: nn.Module, names: Sequence[str]) -> Sequence[str] | None:
    """``names`` if the inputs must be passed by these names; None if their order is enough.

    Inputs are passed by name where ``forward`` has an argument of each one's name.
    """
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return None
    in_order = [p.name for p in parameters if p.kind in _POSITIONAL]
    known = {p.name for p in parameters if p.kind in _NAMED}
    takes_any = not in_order and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    takes_any &= all(p.kind is not inspect.Parameter.VAR_POSITIONAL for p in parameters)
    by_name = takes_any or set(names) <= known
    return list(names) if by_name and in_order[: len(names)] != list(names) else None


def widen_weights(module: nn.Module, *dtypes: torch.dtype) -> dict[str, torch.dtype]:
    """Convert weights of ``dtypes`` to float32; ``--dtype`` sets the artifact's precision.

    Returns:
        The former datatypes, for ``narrow_weights``.
    """
    widened = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype in dtypes:
            widened[name] = tensor.dtype
            tensor.data = tensor.data.float()
    return widened


def narrow_weights(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Undo ``widen_weights``, without a loss."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in dtypes:
            tensor.data = tensor.data.to(dtypes[name])


def datatype_of(name: str, value: Tensor) -> Datatype:
    """The published datatype of the output ``name``.

    Raises:
        Unsupported: no protocol has it.
    """
    kind: object = value.dtype if value.layout is torch.strided else value.layout
    if value.is_nested or is_masked_tensor(value):
        kind = type(value).__name__ if is_masked_tensor(value) else "a nested tensor"
    if kind not in DATATYPES:
        raise Unsupported(
            f"output '{name}' is {kind}, which no protocol supports; return dense tensors of "
            "floats, integers or booleans"
        )
    return DATATYPES[value.dtype]


def as_array(value: Tensor) -> Array:
    """The values of a result, which may be a weight, or a view that negates."""
    array: Array = value.detach().resolve_neg().numpy()
    return array


def as_tensors(result: object) -> Sequence[Tensor]:
    """The tensors in the result of ``forward``, in order.

    Raises:
        Unsupported: it holds something else.
    """
    return list(named_tensors(result).values())


def named_tensors(result: object, wanted: Collection[str] = ()) -> dict[str, Tensor]:
    """The tensors in the result of ``forward`` by name, in order; None is left out.

    Keys of dicts, fields of dataclasses and named tuples, and places in lists make the names:
    ``logits``, ``past_key_values.0.key``. A single tensor is ``output``; the members of a tuple are
    ``output_0``, ``output_1``.

    Args:
        wanted: if some members have these names, the others are left out, whatever they are.

    Raises:
        Unsupported: something in it is not a tensor.
    """
    if isinstance(result, Tensor):
        return {"output": result}
    members = _members(result)
    if members is None:
        raise _no_tensor("", result)
    if isinstance(result, tuple | list) and not hasattr(result, "_fields"):
        single = len(members) == 1 and isinstance(members[0][1], Tensor)
        members = [("output" if single else f"output_{key}", value) for key, value in members]
    chosen = [m for m in members if any(w == m[0] or w.startswith(f"{m[0]}.") for w in wanted)]
    found: dict[str, Tensor] = {}
    for key, member in chosen or members:
        for name, value in _leaves(key, member):
            while name in found:
                name += "_"
            found[name] = value
    if not found:
        raise Unsupported("forward() returns no tensor; return a tensor, or a dict of tensors")
    return found


def _leaves(name: str, value: object, levels: int = MOST_LEVELS) -> Iterator[tuple[str, Tensor]]:
    if not levels:
        first = name.partition(".")[0]
        raise Unsupported(
            f"forward() returns containers nested more than {MOST_LEVELS} levels deep as '{first}',"
            " or one that holds itself; return tensors in fewer"
        )
    members = [] if value is None or isinstance(value, Tensor) else _members(value)
    if isinstance(value, Tensor):
        yield name, value
    if members is None:
        raise _no_tensor(f" as '{name}'", value)
    for key, member in members:
        yield from _leaves(f"{name}.{key}", member, levels - 1)


def _no_tensor(where: str, value: object) -> Unsupported:
    return Unsupported(
        f"forward() returns {type(value).__name__}{where}; return tensors, alone or in tuples, "
        "dicts and dataclasses, or choose those with names by --output-name"
    )


def _members(value: object) -> list[tuple[str, Any]] | None:
    """The members of a container by name; None if ``value`` is none."""
    if isinstance(value, Mapping):
        return [(str(key), member) for key, member in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", None) or map(str, range(len(value)))
        return list(zip(names, value, strict=True))
    own, cross = (getattr(value, f"{kind}_attention_cache", None) for kind in ("self", "cross"))
    if own is not None and cross is not None:  # the caches of a decoder, by layer as Optimum names
        pairs = zip(_members(own) or [], _members(cross) or [], strict=False)
        return [(i, {"decoder": mine, "encoder": theirs}) for (i, mine), (_, theirs) in pairs]
    layers = getattr(value, "layers", None)  # a key-value cache of transformers
    if isinstance(layers, list) and all(hasattr(x, "keys") for x in layers):
        return [(str(i), {"key": x.keys, "value": x.values}) for i, x in enumerate(layers)]
    return None
