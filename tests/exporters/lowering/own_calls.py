"""Calls of operators that PyTorch's samples do not reach, and what is special about some."""

from __future__ import annotations

import torch

from tests.exporters.lowering.layer_calls import REFUSED, STATIC, TRAINED, layer_calls
from tests.exporters.lowering.oracle import OperatorCall, direct_call

#: Operators tested by programs, not by calls.
TESTED_ELSEWHERE = REFUSED | {"item", "_local_scalar_dense", "sym_size.int", "sym_numel"}

#: Operators whose recorded calls are of no use: views into memory that was not recorded, and
#: reflections of batches without examples, which TensorFlow refuses.
OWN_ONLY = TRAINED | {"as_strided", "reflection_pad1d", "reflection_pad2d"}

#: Operators whose arguments of type ``SymInt`` are symbolic in real programs.
SYMBOLIC = frozenset(
    (
        *("arange", "arange.start", "arange.start_step", "as_strided", "constant_pad_nd"),
        *("expand", "full", "new_full", "new_ones", "new_zeros", "ones", "repeat", "reshape"),
        *("roll", "select.int", "select_scatter", "slice.Tensor", "slice_scatter"),
        *("split_with_sizes", "view", "zeros", "_unsafe_view", "empty.memory_format"),
    )
)

#: Dims that no program leaves unknown: (index of the tensor) → dims; None for all.
STATIC_DIMS: dict[str, dict[int, tuple[int, ...] | None]] = {
    # The number of results, or of their dimensions, depends on these.
    "split.Tensor": {0: None},
    "squeeze": {0: None},
    "squeeze.dim": {0: None},
    "squeeze.dims": {0: None},
    "unbind.int": {0: None},
    **STATIC,
}

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

_CUBE = torch.arange(24.0).reshape(2, 3, 4).sin()
_add("as_strided", _CUBE, [3, 2], [1, 4], 2)
_add("as_strided", _CUBE, [2, 4, 3], [12, 1, 4])
_add("as_strided", _CUBE, [2, 2, 3, 2], [12, 4, 1, 2], 1)
_add("contiguous", _CUBE)
_add("copy", _INTS.reshape(2, 3), torch.tensor([1.5, -2.5, 3.5]))
_add("copy", _CUBE, torch.tensor(4))
_add("fill.Tensor", _CUBE, torch.tensor(2))
_add("gt.Scalar", _CUBE, 0.25)
_add("gt.Scalar", _INTS, 2.5)
_SPECIAL = torch.tensor([1.0, float("inf"), -float("inf"), float("nan"), 0.0])
_add("isfinite", _SPECIAL)
_add("isfinite", _INTS)
_add("isinf", _SPECIAL)
_add("isnan", _SPECIAL)
_add("lift_fresh_copy", _CUBE)
_WEIGHT, _BIAS = torch.linspace(-1, 1, 20).reshape(5, 4), torch.linspace(-3, 2, 5)
for _rows in (_CUBE, _CUBE[0], _CUBE[0, 0], _CUBE[None]):
    _add("linear", _rows, _WEIGHT, _BIAS)
    _add("linear", _rows, _WEIGHT)
_add("linear", _CUBE, _WEIGHT[0])
for _left, _right in (
    (_CUBE, _WEIGHT.T),
    (_CUBE, _CUBE.mT),
    (_CUBE[0], _CUBE.mT),
    (_CUBE, _CUBE[0, 0]),
    (_CUBE[0, :, 0], _CUBE),
    (_CUBE[0, 0], _CUBE[1, 1]),
    (_CUBE[None], _CUBE.mT[:, None]),
    (_INTS.reshape(2, 3).long(), _INTS.reshape(3, 2).long()),
):
    _add("matmul", _left, _right)
for _pad in ([1, 2], [0, 3], [2, 0], [-1, 2]):
    _add("reflection_pad1d", _CUBE, _pad)
    _add("reflection_pad2d", _CUBE, [*_pad, 1, 2])
_add("reshape", _CUBE, [4, -1])
_add("reshape", _CUBE.permute(2, 0, 1), [4, 3, 2])
_add("view.dtype", _INTS, torch.float32)
_add("where.Scalar", _BOOLS, 1, 2.5)
_add("where.ScalarOther", _CUBE > 0, _CUBE, -3)
_add("where.ScalarSelf", _CUBE > 0, 2, _CUBE)
for _call in layer_calls():
    OWN_CALLS.setdefault(_call.name, []).append(_call)
