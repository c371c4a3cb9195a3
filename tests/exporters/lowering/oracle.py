"""PyTorch's own samples as the oracle of the table of operators.

PyTorch's test suite has sample inputs for each function (``OpInfo``). They are run once, and every
call of an ATen operator below them is recorded with its result. A lowering must give the same.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from modelport.exporters.lowering.datatypes import tf_dtype
from modelport.exporters.lowering.operators import OPERATORS
from modelport.exporters.lowering.registry import apply, name_of
from modelport.exporters.runtime.tensorflow_runtime import tf

#: Samples of each function, by datatype.
SAMPLES = {torch.float32: 12, torch.int64: 3, torch.bool: 2}
#: Recorded calls of each operator, by datatype of its first tensor.
CALLS_KEPT = 8
#: Larger tensors would cost time without testing more.
LARGEST_TENSOR = 20_000

#: Operators whose values are not defined, or not asked for.
UNDEFINED_VALUES = frozenset(
    ("empty.memory_format", "empty_like", "empty_permuted", "empty_strided", "new_empty")
)

#: Operators whose second result are indices; equal elements have several that are right:
#: the place of the dimension among the arguments.
TIES = {"topk": 2, "sort": 1, "kthvalue": 2, "median.dim": 1}


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call of an operator, with what PyTorch returned."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any

    def __repr__(self) -> str:
        def shown(x: Any) -> Any:
            return f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, torch.Tensor) else x

        args = torch.utils._pytree.tree_map(shown, (self.args, dict(self.kwargs)))
        return f"{self.name}{args}"


class _Recorder(TorchDispatchMode):
    """Keeps calls of operators in the table, a few of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[Any, OperatorCall]] = defaultdict(dict)
        self._counts: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        result = func(*args, **kwargs)
        if name not in OPERATORS:
            return result
        tensors = _tensors((args, kwargs))
        kind = (name, tensors[0].dtype if tensors else None)
        if self._counts[kind] >= CALLS_KEPT or any(_odd(x) for x in tensors + _tensors(result)):
            return result
        call = OperatorCall(name, *_copied((tuple(args), kwargs, result)))
        if repr(call) not in self.calls[name]:
            self._counts[kind] += 1
            self.calls[name][repr(call)] = call
        return result


def _leaves(tree: Any) -> list[Any]:
    return list(torch.utils._pytree.tree_leaves(tree))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in _leaves(tree) if isinstance(x, torch.Tensor)]


def _copied(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), tree)


def _odd(x: torch.Tensor) -> bool:
    return x.layout is not torch.strided or x.numel() > LARGEST_TENSOR or x.is_conj() or x.is_neg()


@cache
def recorded_calls() -> Mapping[str, Sequence[OperatorCall]]:
    """Calls of the operators in the table, by name, in the order of PyTorch's samples."""
    with warnings.catch_warnings(action="ignore"):
        from torch.testing._internal.common_methods_invocations import op_db
    recorder = _Recorder()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors, for which threads only wait for each other
    for info in op_db:
        for dtype, count in SAMPLES.items():
            if dtype in info.dtypes:
                torch.manual_seed(0)
                _record(info, dtype, count, recorder)
    torch.set_num_threads(threads)
    return {name: list(calls.values()) for name, calls in recorder.calls.items()}


def _record(info: Any, dtype: torch.dtype, count: int, recorder: _Recorder) -> None:
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        # info.sample_inputs() would look through the stack for the name of a test each time
        samples = info.sample_inputs_func(info, "cpu", dtype, requires_grad=False)
        for sample in islice(samples, count):
            with recorder:
                try:
                    info(sample.input, *sample.args, **sample.kwargs)
                except Exception:  # samples that PyTorch itself refuses
                    continue


def direct_call(name: str, *args: Any, **kwargs: Any) -> OperatorCall:
    """A call of one's own, for operators that PyTorch's samples do not reach."""
    packet, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")
    with torch.no_grad():
        result = function(*_copied(args), **kwargs)
    return OperatorCall(name, args, kwargs, result)


def as_tensorflow(tree: Any) -> Any:
    """The tensors of ``tree`` as TensorFlow's."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, to_tensorflow, tree)


def to_tensorflow(x: torch.Tensor) -> Any:
    if x.dtype is torch.bfloat16:
        return tf.cast(x.float().numpy(), tf.bfloat16)
    return tf.constant(x.numpy(), tf_dtype(x.dtype))


def difference(call: OperatorCall, result: Any) -> str | None:
    """The first difference between ``result`` and PyTorch's; None if there is none."""
    expected = call.result if isinstance(call.result, tuple | list) else [call.result]
    found = result if isinstance(result, tuple | list) else [result]
    if len(found) != len(expected):
        return f"{call}: {len(found)} results instead of {len(expected)}"
    for theirs, ours in zip(expected, found, strict=True):
        if ours is None or not isinstance(theirs, torch.Tensor):
            continue
        if call.name in TIES and theirs is expected[1]:
            theirs, ours = expected[0], _chosen(call, ours)
        if ours.dtype != tf_dtype(theirs.dtype):
            return f"{call}: {ours.dtype.name} instead of {theirs.dtype}"
        if tuple(ours.shape) != tuple(theirs.shape):
            return f"{call}: {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
        if call.name not in UNDEFINED_VALUES and not _close(theirs, ours):
            return f"{call}: {ours.numpy()!r:.200} instead of {theirs!r:.200}"
    return None


def _chosen(call: OperatorCall, indices: Any) -> Any:
    """The elements that ``indices`` choose; which of equal ones it is is undefined."""
    x, index = call.args[0], torch.from_numpy(np.array(indices))
    if x.ndim == 0:
        return to_tensorflow(x)
    place = TIES[call.name]
    dim = call.args[place] if len(call.args) > place else -1
    if index.ndim == x.ndim:
        return to_tensorflow(x.gather(dim, index))
    return to_tensorflow(x.gather(dim, index.unsqueeze(dim)).squeeze(dim))


def _close(theirs: torch.Tensor, ours: Any) -> bool:
    if theirs.dtype is torch.bfloat16:
        return np.allclose(
            tf.cast(ours, tf.float32).numpy(), theirs.float().numpy(), 1e-2, 1e-2, True
        )
    rtol, atol = (1e-7, 1e-8) if theirs.dtype is torch.float64 else (1e-4, 1e-5)
    return np.allclose(ours.numpy(), theirs.numpy(), rtol=rtol, atol=atol, equal_nan=True)


def eager_difference(call: OperatorCall) -> str | None:
    """Run the lowering of ``call`` eagerly, and compare."""
    return difference(call, apply(call.name, *as_tensorflow((call.args, dict(call.kwargs)))))


class DynamicRun:
    """The lowerings of several calls, traced in one ``tf.function`` without knowing sizes.

    Args:
        static_dims: (index of the tensor among the call's tensors) → dims that stay static; None
            for all of them.
        symbolic: so many arguments of type ``SymInt`` of each call are tensors, too.
    """

    def __init__(
        self,
        calls: Sequence[OperatorCall],
        static_dims: Mapping[int, tuple[int, ...] | None],
        symbolic: int,
    ) -> None:
        self.calls = calls
        self._static_dims = static_dims
        self._symbolic = symbolic

    def differences(self) -> list[str]:
        flat, specs, rebuild = [], [], []
        for call in self.calls:
            values, signature, arguments = self._split(call)
            rebuild.append((call, len(flat), arguments))
            flat += values
            specs += signature

        @tf.function(input_signature=specs, autograph=False)  # as programs are lowered
        def run(*tensors: Any) -> list[Any]:
            results = []
            for call, start, arguments in rebuild:
                args, kwargs = arguments(tensors[start:])
                result = apply(call.name, args, kwargs)
                several = isinstance(result, tuple | list)
                results.append([x for x in result if x is not None] if several else [result])
            return results

        found = []
        for call, result in zip(self.calls, run(*flat), strict=True):
            theirs = call.result if isinstance(call.result, tuple | list) else [call.result]
            tensors = [x for x in theirs if isinstance(x, torch.Tensor)][: len(result)]
            trimmed = OperatorCall(call.name, call.args, call.kwargs, tensors)
            if (message := difference(trimmed, result)) is not None:
                found.append(message)
        return found

    def _split(self, call: OperatorCall) -> tuple[list[Any], list[Any], Callable[..., Any]]:
        """Values, their signature, and a function that makes the call's arguments of tensors."""
        tree = (call.args, dict(call.kwargs))
        if self._symbolic:
            tree = (tuple(_marked(call, self._symbolic)), dict(call.kwargs))
        leaves, structure = torch.utils._pytree.tree_flatten(tree)
        values, specs, places = [], [], []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, _SymbolicInt):
                values.append(tf.constant(int(leaf), tf.int32))
                specs.append(tf.TensorSpec([], tf.int32))
            elif isinstance(leaf, torch.Tensor):
                number = sum(isinstance(each, torch.Tensor) for each in leaves[:place])
                values.append(to_tensorflow(leaf))
                specs.append(self._spec(leaf, number))
            else:
                continue
            places.append(place)

        def arguments(tensors: Sequence[Any]) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=False):
                filled[place] = tensor
            return torch.utils._pytree.tree_unflatten(filled, structure)

        return values, specs, arguments

    def _spec(self, tensor: torch.Tensor, number: int) -> Any:
        static = self._static_dims.get(number, ())
        dims = [
            size if static is None or dim in static or dim - tensor.ndim in static else None
            for dim, size in enumerate(tensor.shape)
        ]
        return tf.TensorSpec(dims, tf_dtype(tensor.dtype))


class _SymbolicInt(int):
    """A size that the program knows only at run time."""


def _marked(call: OperatorCall, most: int) -> Iterator[Any]:
    """The call's positional arguments, with ``most`` sizes above 1 marked as symbolic."""
    left = iter(range(most))

    def marked(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [marked(each) for each in value]
        size = type(value) is int and 1 < abs(value) < 2**31
        return _SymbolicInt(value) if size and next(left, None) is not None else value

    packet, _, overload = call.name.partition(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema
    # the argument's own type would be ``int``
    symbolic = set(re.findall(r"SymInt\S* (\w+)", str(schema)))
    for argument, value in zip(schema.arguments, call.args, strict=False):
        yield marked(value) if argument.name in symbolic else value
