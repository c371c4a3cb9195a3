"""The table of operators: PyTorch's name → the function that computes it with TensorFlow.

A name is that of the ATen schema without namespace and without ``.default``: ``add.Tensor``,
``relu``. Other namespaces keep theirs (``torchvision.nms``), functions of Python are named by
module (``operator.floordiv``, ``torch.sym_max``), and higher-order operators by their own name
(``cond``, ``while_loop``).

A function takes the arguments of the schema, with the schema's defaults: tensors as TensorFlow's,
``ScalarType`` as ``torch.dtype``, ``SymInt`` as an int or a scalar tensor, sub-graphs as callables
of their arguments. Arguments about storage, such as ``device``, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Lowering = Callable[..., Any]

OPERATORS: dict[str, Lowering] = {}

#: Arguments about storage, which TensorFlow decides.
STORAGE = frozenset(
    ("device", "generator", "layout", "memory_format", "non_blocking", "pin_memory")
)


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Register the decorated function as the lowering of the operators ``names``."""

    def register(function: Lowering) -> Lowering:
        for name in names:
            if name in OPERATORS:
                raise ValueError(f"operator '{name}' is lowered twice")
            OPERATORS[name] = function
        return function

    return register


def name_of(target: Any) -> str:
    """The name in the table of a node's ``target``."""
    if hasattr(target, "_schema"):
        return str(target).removeprefix("aten.").removesuffix(".default")
    module = getattr(target, "__module__", "") or ""
    if module in ("_operator", "math", "torch"):
        return f"{module.removeprefix('_')}.{target.__name__}"
    return str(target)


def apply(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute the operator ``name``."""
    taken = {key: value for key, value in kwargs.items() if key not in STORAGE}
    return OPERATORS[name](*args, **taken)
