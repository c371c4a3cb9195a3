"""Stand-ins for the objects that a pickled checkpoint has beside or around its tensors.

Training scripts save configurations, metrics and whole modules, whose classes may run anything when
they are loaded. PyTorch's restricted unpickler builds a stand-in for each of them: it imports
nothing, runs nothing, and keeps what the file says of its attributes.
"""

from __future__ import annotations

import _compat_pickle
import builtins
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelport.gateway.errors import IntegrityError

#: Modules of Python whose classes only hold values. A checkpoint with anything else of Python's own
#: library, such as ``os.system``, is an attack, and is refused as a whole.
HOLD_VALUES = frozenset(
    {"argparse", "collections", "datetime", "decimal", "enum", "fractions", "pathlib", "types"}
    | {"typing", "uuid"}
)
#: Submodules of a pickled module, and characters of their names; a module in a small file may have
#: itself below it, or share one among more than there is time.
MOST_MODULES, MOST_CHARACTERS = 1 << 17, 1 << 26
#: The attributes of an ``nn.Module`` that its weights are in, and its submodules.
PARTS = ("_parameters", "_buffers", "_modules")


class StandIn:
    """An object whose class is not loaded."""

    def __init__(self, *arguments: object) -> None:
        self.attributes: Mapping[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        self.attributes = state if isinstance(state, dict) else {}


@contextmanager
def instead_of_classes(path: Path) -> Iterator[None]:
    """Let ``torch.load(path, weights_only=True)`` build stand-ins.

    Names of Python's own library are left out, so that torch refuses them. So are all of a file in
    the format before PyTorch 1.6, whose names are not known before it is read.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # whatever is wrong with the file, reading it says so
        names = []
    classes: list[Any] = [
        (type(name.rpartition(".")[2], (StandIn,), {}), name) for name in names if _is_data(name)
    ]
    with torch.serialization.safe_globals(classes):
        yield


def _is_data(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    module = _compat_pickle.IMPORT_MAPPING.get(module, module)  # Python 2's names
    if module == "builtins":
        return isinstance(getattr(builtins, attribute, None), type)
    return module in HOLD_VALUES or module.partition(".")[0] not in sys.stdlib_module_names


def is_module(value: object) -> bool:
    """Whether a stand-in is of an ``nn.Module``."""
    return isinstance(value, StandIn) and all(
        isinstance(value.attributes.get(part), dict) for part in PARTS
    )


def state_dict(module: StandIn) -> OrderedDict[str, Tensor]:
    """The weights of a pickled module, by the keys of ``nn.Module.state_dict``.

    Raises:
        IntegrityError: it has more submodules than any model.
    """
    state: OrderedDict[str, Tensor] = OrderedDict()
    waiting, characters = [("", module)], 0
    for _ in range(MOST_MODULES):
        if not waiting:
            return state
        prefix, each = waiting.pop()
        entries = sum(
            len(each.attributes[part]) for part in ("_parameters", "_buffers", "_modules")
        )
        characters += len(prefix) * (1 + entries)
        if characters > MOST_CHARACTERS:
            break
        passing = each.attributes.get("_non_persistent_buffers_set") or ()
        weights = {
            **each.attributes["_parameters"],
            **{k: v for k, v in each.attributes["_buffers"].items() if k not in passing},
        }
        named = [(k, v) for k, v in weights.items() if isinstance(k, str)]
        state.update({prefix + k: v for k, v in named if isinstance(v, Tensor)})
        inner = reversed(each.attributes["_modules"].items())
        waiting += [(f"{prefix}{k}.", v) for k, v in inner if isinstance(k, str) and is_module(v)]
    raise IntegrityError("it has more submodules than any model; save model.state_dict()")
