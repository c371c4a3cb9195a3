"""Branches and loops; their sub-graphs come as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from modelport.exporters.lowering import loops
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.errors import Unsupported

SubGraph = Callable[..., list[Any]]


def _value(x: Any) -> Any:
    """``x`` as a value that changes from turn to turn: a size becomes a scalar tensor."""
    return x if tf.is_tensor(x) or x is None else tf.constant(x)


@lowers("cond")
def cond(
    predicate: Any, if_true: SubGraph, if_false: SubGraph, operands: Sequence[Any] = ()
) -> list[Any]:
    if not tf.is_tensor(predicate):
        return (if_true if predicate else if_false)(*operands)
    branches = (
        lambda: [_value(x) for x in if_true(*operands)],
        lambda: [_value(x) for x in if_false(*operands)],
    )
    return list(tf.cond(tf.reshape(predicate, []), *branches))


@lowers("while_loop")
def while_loop(
    condition: SubGraph, body: SubGraph, carried: Sequence[Any], additional: Sequence[Any] = ()
) -> list[Any]:
    def goes_on(*values: Any) -> Any:
        (result,) = condition(*values, *additional)
        return tf.reshape(result, []) if tf.is_tensor(result) else result

    def turn(*values: Any) -> list[Any]:
        results = body(*values, *additional)
        return [_conform(_value(new), old) for new, old in zip(results, values, strict=True)]

    start = [_value(x) for x in carried]
    return list(tf.while_loop(goes_on, turn, start, shape_invariants=[x.shape for x in start]))


def _conform(new: Any, old: Any) -> Any:
    new = new if new.dtype == old.dtype else tf.cast(new, old.dtype)
    new.set_shape(old.shape)
    return new


@lowers("scan")
def scan(
    combine: SubGraph, init: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any] = ()
) -> list[Any]:
    """The last state, then the results of all steps along the first axis."""

    def step(state: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = combine(*state, *slices, *additional)
        return list(results[: len(init)]), list(results[len(init) :])

    return _over_first_axis(step, list(init), list(xs))


@lowers("map_impl")
def map_over_first_axis(
    function: SubGraph, xs: Sequence[Any], others: Sequence[Any] = ()
) -> list[Any]:
    def step(state: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        return [], list(function(*slices, *others))

    return _over_first_axis(step, [], list(xs))


def _over_first_axis(step: loops.Step, init: list[Any], xs: list[Any]) -> list[Any]:
    # One turn outside of the loop tells the datatypes and shapes of the results; TensorFlow
    # prunes it.
    _, like = step(init, [x[0] for x in xs])
    final, results = loops.scan(step, init, xs, like)
    return [*final, *results]


@lowers("wrap_with_set_grad_enabled")
def wrap_with_set_grad_enabled(enabled: bool, function: SubGraph, *operands: Any) -> list[Any]:
    return function(*operands)


@lowers("wrap_with_autocast")
def wrap_with_autocast(
    device: str, dtype: Any, enabled: bool, cache: Any, function: SubGraph, *operands: Any
) -> list[Any]:
    if enabled:
        raise Unsupported("it runs under autocast; leave torch.autocast out of forward")
    return function(*operands)
