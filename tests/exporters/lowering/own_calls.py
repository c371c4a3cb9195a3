"""Calls of operators that PyTorch's samples do not reach, and what is special about some."""

from __future__ import annotations

import torch

from tests.exporters.lowering.oracle import OperatorCall, direct_call

#: Operators tested by programs, not by calls.
TESTED_ELSEWHERE = frozenset(("item", "_local_scalar_dense", "sym_size.int", "sym_numel"))

#: Operators whose arguments of type ``SymInt`` are symbolic in real programs.
SYMBOLIC = frozenset(())

#: Dims that no program leaves unknown: (index of the tensor) → dims; None for all.
STATIC_DIMS: dict[str, dict[int, tuple[int, ...] | None]] = {}

_INTS = torch.tensor([-7, -3, 0, 3, 8, 100], dtype=torch.int32)
_BOOLS = torch.tensor([True, False, True])

OWN_CALLS: dict[str, list[OperatorCall]] = {}


def _add(name: str, *args: object, **kwargs: object) -> None:
    OWN_CALLS.setdefault(name, []).append(direct_call(name, *args, **kwargs))


for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    _add(f"{_name}.Tensor", _INTS, _INTS.flip(0))
    _add(f"{_name}.Tensor", _BOOLS, _BOOLS.flip(0))
    _add(f"{_name}.Scalar", _INTS, 6)
    _add(f"{_name}.Scalar_Tensor", 6, _INTS)
_add("bitwise_not", _INTS)
_add("bitwise_not", _BOOLS)
for _name in ("bitwise_left_shift", "bitwise_right_shift"):
    _add(f"{_name}.Tensor_Scalar", _INTS, 2)
_FLOATS = torch.tensor([[-2.5, -1.0, -0.3], [0.0, 1.7, 4.2]])
for _bound in (-1, 1.5):
    _add("clamp_max", _FLOATS, _bound)
_add("clamp_max.Tensor", _FLOATS, torch.tensor([0.5, -1.0, 2.0]))
_add("clamp_min.Tensor", _FLOATS, torch.tensor([0.5, -1.0, 2.0]))
for _mode in (None, "floor", "trunc"):
    _add("div.Scalar_mode", _FLOATS, 0.7, rounding_mode=_mode)
    _add("div.Scalar_mode", _INTS, 3, rounding_mode=_mode)
_add("fmod.Scalar", _FLOATS, 1.3)
_add("fmod.Scalar", _FLOATS, -1.3)
_add("fmod.Scalar", _INTS, 3)
_add("pow.Scalar", 2.5, _FLOATS)
_add("pow.Scalar", 2, _FLOATS)
