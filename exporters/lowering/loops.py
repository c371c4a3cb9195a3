"""Loops over the first axis of tensors, whose length may be known only at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from modelport.exporters.lowering.built_in import only_built_in
from modelport.exporters.lowering.sizes import size
from modelport.exporters.runtime.tensorflow_runtime import tf

#: One step: the state and the slices to the next state and the slices of the results.
Step = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]


def scan(
    step: Step, state: Sequence[Any], xs: Sequence[Any], like: Sequence[Any], reverse: bool = False
) -> tuple[list[Any], list[Any]]:
    """Run ``step`` over the slices of ``xs`` in order; return the last state and the results.

    Args:
        like: the datatype and static shape of each result's slices.
        reverse: run from the last slice to the first; results keep the order of ``xs``.
    """
    length = size(xs[0], 0)
    stack = _Concatenation if only_built_in() else _TensorArray
    stacks = [stack(each, length, reverse) for each in like]
    counts = len(state)

    def body(number: Any, *values: Any) -> list[Any]:
        place = length - 1 - number if reverse else number
        old = list(values[:counts])
        new, results = step(old, [x[place] for x in xs])
        new = [_same_shape(a, b) for a, b in zip(new, old, strict=True)]
        written = [
            s.written(stored, place, result)
            for s, stored, result in zip(stacks, values[counts:], results, strict=True)
        ]
        return [number + 1, *new, *written]

    _, *values = tf.while_loop(
        lambda number, *_: number < length,
        body,
        [tf.constant(0), *state, *(s.empty() for s in stacks)],
        shape_invariants=[
            tf.TensorShape([]),
            *(x.shape for x in state),
            *(s.invariant for s in stacks),
        ],
    )
    final = list(values[:counts])
    return final, [s.stacked(stored) for s, stored in zip(stacks, values[counts:], strict=True)]


def _same_shape(new: Any, old: Any) -> Any:
    new.set_shape(old.shape)
    return new


class _TensorArray:
    """Results in an array of tensors."""

    invariant = tf.TensorShape(None)

    def __init__(self, like: Any, length: Any, reverse: bool) -> None:
        self._like, self._length = like, length

    def empty(self) -> Any:
        return tf.TensorArray(self._like.dtype, self._length, element_shape=self._like.shape)

    def written(self, stored: Any, place: Any, value: Any) -> Any:
        return stored.write(place, value)

    def stacked(self, stored: Any) -> Any:
        return stored.stack()


class _Concatenation:
    """Results in one tensor that grows with each step."""

    def __init__(self, like: Any, length: Any, reverse: bool) -> None:
        self._like, self._reverse = like, reverse
        self.invariant = tf.TensorShape([None, *like.shape])

    def empty(self) -> Any:
        return tf.zeros(tf.concat([[0], tf.shape(self._like)], 0), self._like.dtype)

    def written(self, stored: Any, place: Any, value: Any) -> Any:
        parts = [stored, value[tf.newaxis]]
        return tf.concat(parts[::-1] if self._reverse else parts, 0)

    def stacked(self, stored: Any) -> Any:
        return stored
