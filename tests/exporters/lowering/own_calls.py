"""Calls of operators that PyTorch's samples do not reach, and what is special about some."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable

import torch

from modelport.exporters.lowering.registry import name_of
from tests.exporters.lowering.layer_calls import REFUSED, STATIC, TRAINED, layer_calls
from tests.exporters.lowering.oracle import OperatorCall, direct_call

#: Operators tested by programs, not by calls.
TESTED_ELSEWHERE = REFUSED | frozenset(
    (
        *("_local_scalar_dense", "item", "operator.getitem", "sym_numel", "sym_size.int"),
        *("torch.sym_ite", "torch.sym_sum"),
    )
)

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

OWN_CALLS: dict[str, list[OperatorCall]] = {}


def _add(name: str, *args: object, **kwargs: object) -> None:
    OWN_CALLS.setdefault(name, []).append(direct_call(name, *args, **kwargs))


def _add_numbers(function: Callable[..., object], *numbers: float) -> None:
    """A call of a function of Python with numbers that are known only at run time."""
    dtypes = {bool: torch.bool, int: torch.int32, float: torch.float32}

    def scalar(number: object) -> torch.Tensor:
        return torch.tensor(number, dtype=dtypes[type(number)])

    name = name_of(function)
    call = OperatorCall(name, tuple(map(scalar, numbers)), {}, scalar(function(*numbers)))
    OWN_CALLS.setdefault(name, []).append(call)


_INTS = torch.tensor([-7, -3, 0, 3, 8, 100], dtype=torch.int32)
_BOOLS = torch.tensor([True, False, True])

for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    _add(f"{_name}.Tensor", _INTS, _INTS.flip(0))
    _add(f"{_name}.Tensor", _BOOLS, _BOOLS.flip(0))
    _add(f"{_name}.Scalar", _INTS, 6)
    _add(f"{_name}.Scalar_Tensor", 6, _INTS)
_add("bitwise_not", _INTS)
_add("bitwise_not", _BOOLS)
for _name in ("bitwise_left_shift", "bitwise_right_shift"):
    _add(f"{_name}.Tensor_Scalar", _INTS, 2)
    _add(f"{_name}.Scalar_Tensor", 100, _INTS[2:5])
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
for _name in ("acos", "asin"):
    _add(_name, torch.complex(_FLOATS / 5, _FLOATS.flip(0) / 5))

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

for _function in (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv),
    *(operator.mod, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    *(torch.sym_max, torch.sym_min),
):
    for _numbers in ((7, 2), (-7, 2), (3, 3), (2.5, 1.5)):
        _add_numbers(_function, *_numbers)
_add_numbers(operator.pow, 3, 4)
for _function in (operator.and_, operator.or_):
    _add_numbers(_function, True, False)
    _add_numbers(_function, True, True)
_add_numbers(torch.sym_not, True)
_add_numbers(torch.sym_float, 3)
for _number in (2.5, -2.5, 3):
    for _function in (math.floor, math.ceil, math.trunc, torch.sym_int, operator.neg, operator.abs):
        _add_numbers(_function, _number)
for _name in ("add", "sub", "rsub"):
    _add(f"{_name}.Tensor", _CUBE, _CUBE * 2, alpha=3)
    _add(f"{_name}.Tensor", _INTS, _INTS.flip(0), alpha=2)
    _add(f"{_name}.Scalar", _CUBE, 2, 5)
for _exponent in (2, 3, 0.5, -0.5, 1.7, -1):
    _add("pow.Tensor_Scalar", _CUBE.abs() + 1, _exponent)
    _add("pow.Tensor_Scalar", _CUBE.long() - 2, int(abs(_exponent)) + 1)
_add("pow.Tensor_Tensor", torch.tensor([2, -1, 3, -1, 1]), torch.tensor([-2, -3, 3, -2, -4]))
_add("matmul", _INTS.reshape(2, 3).to(torch.int8) % 5, _INTS.reshape(3, 2).to(torch.int8) % 5)
_add("linear", _CUBE, _WEIGHT[0], torch.tensor(0.5))
_MIXED = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])
for _name in ("any", "all"):
    _add(_name, _MIXED)
    _add(_name, _MIXED.to(torch.uint8))
    _add(f"{_name}.dim", _MIXED, 1)
    _add(f"{_name}.dim", _MIXED, 0, True)
    _add(f"{_name}.dims", _MIXED, [0, 1])
for _order in (0, 1, 2, 3, float("inf"), -float("inf")):
    _add("linalg_vector_norm", _CUBE, _order, [1])
    _add("linalg_vector_norm", _CUBE, _order, None, True)
_PART = torch.full((2, 3, 4), 9.0)
_add("slice_scatter", _CUBE, _PART[:, :, :2], 2, -3, -1)
_add("slice_scatter", _CUBE, _PART[:, :, :2] * torch.tensor([1, 2]), 2, 1, 4, 2)
_add("slice_scatter", _CUBE, _PART[:, :2], 1, 1, 100)
_add("select_scatter", _CUBE, _PART[:, 0], 1, -1)
_add("select_scatter", _CUBE, _PART[:, 0], 1, 1)
for _offset in (-2, -1, 0, 1, 3):
    _add("diagonal", _CUBE, _offset, 1, 2)
    _add("diagonal", _CUBE, _offset, 2, 0)
_add("roll", _CUBE, [2], [1])
_add("roll", _CUBE, [-1, 3], [0, 2])
_add("expand", _CUBE[0], [5, 3, 4])
_add("expand", _CUBE[:, :1], [2, 7, 4])
_add("expand", _CUBE[:, :1], [3, -1, 5, -1])
_add("div.Tensor_mode", _CUBE, torch.zeros(4), rounding_mode="floor")
_add("slice_scatter", _CUBE, _PART[:, :, :1], 2, 1, 2, 3)
_add("slice_scatter", _CUBE.repeat(1, 1, 2), _PART[:, :, :2] * torch.tensor([1, 2]), 2, 1, 6, 3)
_add("pow.Tensor_Tensor", torch.tensor([2, 3]), torch.tensor([3, 2], dtype=torch.uint8))
_add("pow.Tensor_Tensor", *(torch.tensor([2, 3], dtype=torch.uint8), torch.tensor([5, 2]).byte()))
_GRID = torch.linspace(-1.2, 1.2, 24).reshape(1, 3, 4, 2)
_VOLUME, _POINTS = torch.arange(48.0).reshape(1, 2, 2, 3, 4).cos(), _GRID.reshape(1, 2, 2, 2, 3)
for _interpolation, _padding, _corners in itertools.product(range(3), range(3), (False, True)):
    _add("grid_sampler", _CUBE[None], 2 * _GRID, _interpolation, _padding, _corners)
    if _interpolation != 2:  # PyTorch has no cubic one of volumes
        _add("grid_sampler_3d", _VOLUME, 2 * _POINTS, _interpolation, _padding, _corners)
_add("native_channel_shuffle", torch.arange(24.0).reshape(1, 6, 2, 2), 3)
_add("leaky_relu", _CUBE, -0.3)
_add("celu", _CUBE, 2.5)
_add("select.int", _CUBE, 1, -1)
_add("select.int", _CUBE, 1, -2)
for _value in (True, 2, 1.5):
    _add("full", [2, 3], _value)
    _scalar = torch.tensor(_value, dtype=torch.int32 if _value == 2 else None)
    _result = torch.full([2, 3], _value)
    OWN_CALLS["full"].append(OperatorCall("full", ([2, 3], _scalar), {}, _result))
_add("rrelu_with_noise", _CUBE, torch.zeros(2, 3, 4))
_add("fmod.Scalar", _FLOATS * 1e7, 0.7)
_PLACES = torch.tensor([[-1, 0], [1, -2]])
_add("index.Tensor", _CUBE, [None, _PLACES])
_add("index.Tensor", _CUBE, [_PLACES, None, _PLACES])
for _dim in (0, 1, -1):
    _add("gather", _CUBE, _dim, torch.tensor([[[0, 1]], [[1, 0]]]))
_add("im2col", _CUBE[None], [3, 2], [1, 1], [1, 2], [1, 2])
_add("im2col", _CUBE[None], [2, 3], [1, 1], [0, 0], [1, 1])
_COLUMNS = torch.arange(576.0).reshape(2, 12, 24).sin()
_add("one_hot", _PLACES.abs())
_add("col2im", _COLUMNS, [4, 5], [3, 2], [1, 1], [1, 1], [1, 1])
_BAGS = _WEIGHT, torch.tensor([1, 0, 3, 2]), torch.tensor([0, 2, 2, 3])
for _mode in (0, 1, 2):
    _add("_embedding_bag", *_BAGS, False, _mode)
_add("upsample_bilinear2d.vec", _CUBE[None].double(), [5, 7], False, None)
_add("upsample_bicubic2d.vec", _CUBE[None].double(), [5, 7], True, None)
for _several in ([None, _PLACES, _PLACES], [_PLACES, None, _PLACES.abs()], [None, _PLACES, None]):
    for _accumulate in (False, True):
        _values = torch.zeros(2, 3, 4)[tuple(slice(None) if i is None else i for i in _several)]
        _values = _values + torch.arange(float(_values.numel())).reshape(_values.shape)
        _add("index_put", _CUBE, _several, _values, _accumulate)
_add("index_put", _CUBE, [torch.zeros(2, dtype=torch.bool)], torch.ones(0, 3, 4))
_add("index_put", _CUBE, [torch.tensor([True, False])], torch.ones(1, 3, 4), True)
_add("constant_pad_nd", _CUBE, [-1, 2, 1, -1], 0.5)
_STEPS = torch.tensor([-1, 0, 1, 2])
_add("bucketize.Tensor", _FLOATS, _STEPS)
_add("bucketize.Scalar", 0.7, _STEPS)
_add("bucketize.Tensor", _INTS, _STEPS + 0.5)
