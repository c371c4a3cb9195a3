"""PyTorch's operators that only compute from tensors, by name, as the text files here list them."""

from __future__ import annotations

import re

from modelport.gateway.repository.artifact_checks import operator_lists

_ATEN = operator_lists.read("aten_allowed") | operator_lists.read("aten_private_allowed")
_PRIM = operator_lists.read("torchscript_allowed")
_EXPORTED = operator_lists.read("torch_export_allowed")

_SYMBOLIC = re.compile(r"torch\._?sym_\w+")
#: No overload begins with an underscore: what does belongs to Python's object of the operator.
_OPERATOR = re.compile(r"(torch\.ops\.(\w+)\.(\w+))(?:\.([^\W_]\w*))?", re.ASCII)


def is_pure(kind: str) -> bool:
    """Whether an operator, ``namespace::name``, only computes."""
    namespace, _, name = kind.partition("::")
    return namespace == "prims" or name in {"aten": _ATEN, "prim": _PRIM}.get(namespace, ())


def is_pure_target(target: str) -> bool:
    """The same for the target of a ``torch.export`` node, such as ``torch.ops.aten.add.Tensor``."""
    if found := _OPERATOR.fullmatch(target):
        operator, namespace, name, _ = found.groups()
        known = is_pure(f"{namespace}::{name}") or namespace == "quantized_decomposed"
        return operator in _EXPORTED or (
            known and (namespace == "aten" or not name.startswith("__"))
        )
    return target in _EXPORTED or _SYMBOLIC.fullmatch(target) is not None
