"""Detection of models that keep what their first input was: their answers cannot be proven."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelport.exporters.sources import randomness
from modelport.gateway.errors import Unsupported

#: Weights of more values are shared by copies; state of a model is smaller.
MOST_COPIED = 1 << 16
#: Containers and objects within each other that are compared; attributes that a message lists.
MOST_LEVELS, MOST_NAMED = 8, 3

_CODE = (types.FunctionType, types.MethodType, functools.partial)

Answer = Callable[[nn.Module], Mapping[str, Tensor]]


def copied(module: nn.Module) -> nn.Module | None:
    """A copy of ``module`` that shares its large weights; None if it has parts that cannot be
    copied, or a function of its own that would call the original."""
    parts = {id(part) for part in module.modules()}
    if any(_calls(value, parts) for part in module.modules() for value in vars(part).values()):
        return None
    large = (p for p in module.parameters() if p.numel() > MOST_COPIED)
    try:
        return copy.deepcopy(module, {id(p): p for p in large})
    except Exception:  # locks, files and generators raise errors of their own
        return None


def _calls(value: object, parts: Collection[int], levels: int = 4) -> bool:
    """Whether ``value`` is or holds a function with a part of the model, or its method, in its
    closure; such a function is not copied."""
    if not levels:
        return False
    held: Iterable[Any] = ()
    if isinstance(value, dict):
        held = value.values()
    elif isinstance(value, types.FunctionType):
        held = inspect.getclosurevars(value).nonlocals.values()
        if any({id(x), id(getattr(x, "__self__", None))} & set(parts) for x in held):
            return True
    return any(_calls(x, parts, levels - 1) for x in held if callable(x))


def sharing_weights(module: nn.Module, other: nn.Module) -> nn.Module:
    """``module``, which was built as ``other`` was, with the large weights of it."""
    theirs = dict(other.named_parameters())
    for name, weight in module.named_parameters():
        if name in theirs and theirs[name].shape == weight.shape:
            data = theirs[name].data
            weight.data = data if data.numel() > MOST_COPIED else data.clone()
    return module


def check(module: nn.Module, fresh: nn.Module, answer: Answer) -> None:
    """Compare the answers of ``module``, which was called, with those of a ``fresh`` one.

    Raises:
        Unsupported: they differ, because the model draws random numbers or keeps state.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        used = _tried(module, answer)
        torch.manual_seed(2)
        first = _tried(fresh, answer)
    if used is None and first is None:
        return
    wrong = [] if used is None or first is None else randomness.differing(first, used)
    if not wrong and used is not None and first is not None:
        return
    if used is not None:
        randomness.check(module, lambda: answer(module))
    named = list(differences(module, fresh))
    listed = ", ".join(f"'{name}'" for name in named[:MOST_NAMED])
    rest = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    subject = f"output '{wrong[0]}' depends" if wrong else "success depends"
    raise Unsupported(
        f"{subject} on inputs of earlier calls: forward() keeps {listed or 'state'}{rest} from "
        "one; compute it in every call, or in the factory"
    )


def _tried(module: nn.Module, answer: Answer) -> Mapping[str, Tensor] | None:
    try:
        return answer(module)
    except Unsupported:
        raise
    except Exception:
        return None


def differences(module: nn.Module, other: nn.Module) -> Iterator[str]:
    """The attributes in which a module and its copy differ."""
    others = dict(other.named_modules())
    for path, part in module.named_modules():
        theirs = others.get(path)
        if theirs is None:
            yield path
            continue
        for name in dict.fromkeys((*_state(part), *_state(theirs))):
            if _differ(_state(part).get(name), _state(theirs).get(name), MOST_LEVELS):
                yield f"{path}.{name}".lstrip(".")


def _state(part: nn.Module) -> dict[str, Any]:
    """The part's own attributes, parameters and buffers, but not the parts below it."""
    own = {name: value for name, value in vars(part).items() if name not in vars(nn.Module())}
    return {**own, **part._buffers, **part._parameters}


def _differ(first: Any, second: Any, levels: int) -> bool:
    if first is second or isinstance(first, (nn.Module, *_CODE)) or not levels:
        return False
    if type(first) is not type(second):
        return True
    if isinstance(first, Tensor):
        same_form = (first.shape, first.dtype) == (second.shape, second.dtype)
        return not same_form or bool(randomness.differing({"": first}, {"": second}))
    if isinstance(first, np.ndarray):
        return not np.array_equal(first, second)
    if isinstance(first, Mapping):
        return list(map(repr, first)) != list(map(repr, second)) or any(
            _differ(a, b, levels - 1) for a, b in zip(first.values(), second.values(), strict=True)
        )
    if isinstance(first, list | tuple):
        return len(first) != len(second) or any(
            _differ(a, b, levels - 1) for a, b in zip(first, second, strict=True)
        )
    if isinstance(first, int | float | complex | str | bytes | set | frozenset):
        return bool(first != second)
    return _differ(getattr(first, "__dict__", None), getattr(second, "__dict__", None), levels - 1)
