"""Detection of models that keep what their first input was: their answers cannot be proven."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modelport.exporters.sources import randomness
from modelport.exporters.sources.shared_state import UncopiedState, differ
from modelport.gateway.errors import Unsupported

#: Weights of more values are shared by copies; state of a model is smaller.
MOST_COPIED = 1 << 16
MOST_NAMED = 3  # how many attributes a message lists
#: What every module has; parameters and buffers are among it.
_INNER = frozenset(vars(nn.Module()))

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
    held: list[Any] = []
    if isinstance(value, dict):
        held = list(value.values())
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                held.append(cell.cell_contents)
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


def check(module: nn.Module, fresh: nn.Module, shared: UncopiedState, answer: Answer) -> None:
    """Compare the answers of ``module``, which was called, with those of a ``fresh`` one.

    Args:
        shared: what both share, as it was before the first call.

    Raises:
        Unsupported: they differ, because the model draws random numbers or keeps state.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        used = _tried(module, answer)
        kept = shared.values()
        shared.restore()
        torch.manual_seed(2)
        first = _tried(fresh, answer)
    if used is None and first is None:
        return
    wrong = [] if used is None or first is None else randomness.differing(first, used)
    if not wrong and used is not None and first is not None:
        return
    if used is not None:
        randomness.check(module, lambda: answer(module))
    now = shared.values()
    named = [name for name, value in kept.items() if differ(value, now.get(name))]
    named += differences(module, fresh)
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


def has_changed(module: nn.Module, unused: nn.Module, shared: UncopiedState) -> bool:
    """Whether a call has changed anything of ``module``; ``unused`` is its copy."""
    return any(differences(module, unused)) or differ(shared.before, shared.values())


def differences(module: nn.Module, unused: nn.Module) -> Iterator[str]:
    """The attributes in which a module and its copy differ."""
    others = dict(unused.named_modules())
    for path, part in module.named_modules():
        theirs = others.get(path)
        if theirs is None:
            yield path
            continue
        own, other = _state(part), _state(theirs)
        for name in dict.fromkeys((*own, *other)):
            if differ(own.get(name), other.get(name)):
                yield f"{path}.{name}".lstrip(".")


def _state(part: nn.Module) -> dict[str, Any]:
    """The part's own attributes, parameters and buffers, but not the parts below it."""
    own = {name: value for name, value in vars(part).items() if name not in _INNER}
    return {**own, **part._buffers, **part._parameters}
