"""Values outside of a module that its code can keep state in: attributes of its classes, and global
variables."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from modelport.exporters.sources import randomness

#: Packages whose classes keep no state outside of their modules, or whose state is not the model's.
LIBRARIES = frozenset({"builtins", "modelport", "peft", "timm", "torch", "torchvision"})
LIBRARIES |= {"transformers"}
_CODE = (types.FunctionType, types.MethodType, functools.partial)
#: Containers and objects within each other that are compared.
MOST_LEVELS = 8
_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, Tensor)


class UncopiedState:
    """Plain values that a module shares with its copies, as they are when this is made."""

    def __init__(self, module: nn.Module) -> None:
        self._classes = {
            kind: None
            for part in module.modules()
            for kind in type(part).__mro__
            if kind.__module__.partition(".")[0] not in LIBRARIES
        }
        self._kept = [(space, name, _copied(value)) for space, name, value in self._places()]
        #: The values by names for messages.
        self.before = self.values()

    def _places(self) -> Iterator[tuple[Any, str, Any]]:
        seen: set[tuple[int, str]] = set()
        for kind in self._classes:
            for name, value in list(vars(kind).items()):
                if isinstance(value, _PLAIN) and not name.startswith("__"):
                    yield kind, name, value
                if not isinstance(value, types.FunctionType):
                    continue
                space = value.__globals__
                for used in value.__code__.co_names:
                    if used in space and isinstance(space[used], _PLAIN):
                        if (id(space), used) not in seen:
                            yield space, used, space[used]
                        seen.add((id(space), used))

    def restore(self) -> None:
        """Set every value that has changed to what it was; remove what was not there."""
        known = {(id(space), name) for space, name, _ in self._kept}
        for space, name, _ in list(self._places()):
            if (id(space), name) not in known:
                _remove(space, name)
        now = {(id(space), name): value for space, name, value in self._places()}
        for space, name, value in self._kept:
            if differ(value, now.get((id(space), name))):
                _set(space, name, _copied(value))

    def values(self) -> dict[str, Any]:
        """Copies of the values as they are now, by names for messages."""
        return {
            f"{space.__name__}.{name}" if isinstance(space, type) else name: _copied(value)
            for space, name, value in self._places()
        }


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # members raise errors of their own
        return value


def _set(space: Any, name: str, value: Any) -> None:
    if isinstance(space, dict):
        space[name] = value
    else:
        setattr(space, name, value)


def _remove(space: Any, name: str) -> None:
    if isinstance(space, dict):
        space.pop(name, None)
    else:
        delattr(space, name)


def differ(first: Any, second: Any, levels: int = MOST_LEVELS) -> bool:
    """Whether two values differ, as far as what they hold can be compared."""
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
            differ(a, b, levels - 1) for a, b in zip(first.values(), second.values(), strict=True)
        )
    if isinstance(first, list | tuple):
        return len(first) != len(second) or any(
            differ(a, b, levels - 1) for a, b in zip(first, second, strict=True)
        )
    if isinstance(first, int | float | complex | str | bytes | set | frozenset):
        return bool(first != second)
    return differ(getattr(first, "__dict__", None), getattr(second, "__dict__", None), levels - 1)
