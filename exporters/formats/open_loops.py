"""Loops of open length, as ``torch``'s scan: what the code of ``loop_rewriting`` calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten

from modelport.exporters.formats.loop_rewriting import PREFIX


class OpenLoop(BaseException):
    """A loop ends at an open size; converters would answer another error by a slower attempt."""


def open_loop(depth: int = 1) -> OpenLoop:
    """The error at the caller's line, or that of one of its callers."""
    frame = sys._getframe(depth + 1)
    return OpenLoop(f"{Path(frame.f_code.co_filename).name} line {frame.f_lineno}")


class StepSpan(NamedTuple):
    """A slice of fixed length that begins at a step."""

    start: Tensor
    length: int


class Steps:
    """A sequence of open length: the results of a loop, or the slices of a tensor, stacked.

    Args:
        first: elements that come before, if there are any.
        rest: the others, stacked; a tree of tensors if each element is one.
        in_front: each of ``rest`` was put in front of the ones before.
    """

    def __init__(self, first: Sequence[Any], rest: Any, in_front: bool = False) -> None:
        self._stacked: Any
        if isinstance(first, Steps):  # a loop goes on where another one has ended
            before = first._stacked
        else:
            before = tree_map(lambda *each: torch.stack(each), *first) if first else None
        parts = [rest] if before is None else [before, rest]
        if in_front:
            parts = [tree_map(lambda x: x.flip(0), rest), *parts[:-1]]
        self._stacked = tree_map(lambda *each: torch.cat(each), *parts) if parts[1:] else parts[0]

    @property
    def length(self) -> Any:
        return tree_leaves(self._stacked)[0].shape[0]

    def at(self, place: Any) -> Any:
        """The element at ``place``, which may be a tensor."""
        if not isinstance(place, Tensor):
            return tree_map(lambda x: x[place], self._stacked)
        return tree_map(lambda x: at(x, place), self._stacked)

    def __iter__(self) -> Iterator[Any]:
        raise open_loop()

    def __getitem__(self, index: Any) -> Any:
        if index == slice(None, None, -1):
            return reversed_(self)
        return Steps((), self._stacked[index]) if isinstance(index, slice) else self.at(index)

    def reverse(self) -> None:
        self._stacked = tree_map(lambda x: x.flip(0), self._stacked)

    def stack(self, dim: int = 0) -> Tensor:
        found: Tensor = self._stacked.movedim(0, dim)
        return found

    def cat(self, dim: int = 0) -> Tensor:
        place = dim % (self._stacked.dim() - 1)
        found: Tensor = self._stacked.movedim(0, place).flatten(place, place + 1)
        return found


class Zipped:
    """Several sequences of open length beside each other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts, self.length = parts, parts[0].length

    def at(self, place: Any) -> tuple[Any, ...]:
        return tuple(part.at(place) for part in self._parts)


def over(x: Any) -> Any:
    """``x``, or its elements if their number is open."""
    return Steps((), x) if isinstance(x, Tensor) and x.dim() and _is_open(x.shape[0]) else x


def unbind(x: Any, dim: int = 0) -> Any:
    return Steps((), x.movedim(dim, 0)) if _is_open(x.shape[dim]) else x.unbind(dim)


def reversed_(x: Any) -> Any:
    x = over(x)
    if isinstance(x, Steps):
        x = Steps((), x._stacked)
        x.reverse()
        return x
    return reversed(x)


def zip_(*sequences: Any, strict: bool = False) -> Any:
    parts = [over(each) for each in sequences]
    if parts and all(isinstance(part, Steps) for part in parts):
        return Zipped(parts)
    return zip(*parts, strict=strict)


def list_(*given: Any) -> Any:
    return Steps((), given[0]._stacked) if given and isinstance(given[0], Steps) else list(*given)


def _is_open(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def is_open(bounds: Any) -> bool:
    return isinstance(bounds, Steps | Zipped) or (
        isinstance(bounds, tuple) and any(map(_is_open, bounds))
    )


def first(count: int, bounds: Any) -> Iterator[Any]:
    """The first steps of an open loop, which are the same for all sizes."""
    if isinstance(bounds, Steps | Zipped):
        return (bounds.at(place) for place in range(count))
    start, _, stride = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    return (start + place * stride for place in range(count))


def select(test: Any, x: Any, y: Any) -> Any:
    """``x`` where a test of a step is true, else ``y``; of what one branch alone sets, that."""
    if x is None or y is None or x is y:
        return y if x is None else x
    if not isinstance(test, Tensor):
        return x if test else y
    return tree_map(lambda a, b: torch.where(test.to(torch.bool), a, b), x, y)


def stack(tensors: Any, *given: Any, **options: Any) -> Tensor:
    if isinstance(tensors, Steps):
        return tensors.stack(*given, **options)
    return torch.stack(tensors, *given, **options)


def cat(tensors: Any, *given: Any, **options: Any) -> Tensor:
    if isinstance(tensors, Steps):
        return tensors.cat(*given, **options)
    return torch.cat(tensors, *given, **options)


def at(x: Any, *parts: Any) -> Any:
    """``x[parts]``, where a part may be a step."""
    if isinstance(x, Steps):
        return x.at(*parts)
    if not isinstance(x, Tensor) or not any(isinstance(p, Tensor | StepSpan) for p in parts):
        return x[parts[0] if len(parts) == 1 else parts]
    if any(isinstance(part, Tensor) and part.dim() for part in parts):
        return x[parts]
    dim = 0
    for part in _without_ellipsis(x, parts):
        if isinstance(part, Tensor):
            x = x.index_select(dim, _not_negative(part, x.shape[dim]).view(1)).squeeze(dim)
            continue
        if isinstance(part, StepSpan):
            x = x.index_select(dim, part.start + torch.arange(part.length))
        elif part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, slice):
            x = x[(*[slice(None)] * dim, part)]
        else:
            x = x.select(dim, part)
            continue
        dim += 1
    return x


def put(x: Tensor, value: Any, *parts: Any) -> Tensor:
    """``x`` after ``x[parts] = value``, where one part is a step, and others are whole axes."""
    parts = _without_ellipsis(x, parts)
    dim = next(i for i, part in enumerate(parts) if isinstance(part, Tensor | StepSpan))
    if any(part != slice(None) for i, part in enumerate(parts) if i != dim):
        raise NotImplementedError("a part of a step is written")
    part = parts[dim]
    length = part.length if isinstance(part, StepSpan) else 1
    start = part.start if isinstance(part, StepSpan) else part
    places = _not_negative(start, x.shape[dim]) + torch.arange(length)
    value = torch.as_tensor(value, dtype=x.dtype)
    if value.dim() and not isinstance(part, StepSpan):
        value = value.unsqueeze(dim - x.dim()) if value.dim() >= x.dim() - dim - 1 else value
    shape = [*x.shape[:dim], length, *x.shape[dim + 1 :]]
    return x.index_copy(dim, places, value.expand(shape))


def _without_ellipsis(x: Tensor, parts: Sequence[Any]) -> tuple[Any, ...]:
    given = sum(part is not None and part is not Ellipsis for part in parts)
    rest = (slice(None),) * (x.dim() - given)
    found = next((i for i, part in enumerate(parts) if part is Ellipsis), None)
    return (*parts, *rest) if found is None else (*parts[:found], *rest, *parts[found + 1 :])


def _not_negative(place: Tensor, size: Any) -> Tensor:
    return torch.where(place < 0, place + size, place)


def run(step: Callable[..., Any], bounds: Any, state: list[Any], done: int) -> tuple[Any, Any]:
    """Repeat ``step`` within ``range(*bounds)``, or for each element, after the first ``done``.

    A loop that may have no step takes one more, whose results are dropped: scan needs a first one.
    So does one that may have a single step, as torch traces a size of 1 apart from all others.

    Raises:
        Exception: the loop is irregular.
    """
    bounds = bounds if isinstance(bounds, tuple) else (bounds.length,)
    first, stop, stride = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if stride not in (1, -1):
        raise NotImplementedError("a loop that leaves out steps")
    first = first + done * stride
    count = (stop - first) * stride
    spare = 0 if statically_known_true(count >= 2) else 1
    turns = torch.arange(count + spare) - spare
    steps = first + stride * turns
    if spare:
        low, high = (first, stop - 1) if stride == 1 else (stop + 1, first)
        steps = torch.clamp(steps, min=low).clamp(max=high).clamp(min=0)
    leaves, form = tree_flatten([torch.zeros(()), *state])
    leaves = [x if isinstance(x, Tensor) else torch.tensor(x) for x in leaves]

    def turned(known: Sequence[Tensor], turn: Tensor, place: Tensor) -> tuple[Any, Any]:
        unused, *given = tree_unflatten(list(known), form)
        found, results = step(place, *given)
        new = [x if isinstance(x, Tensor) else torch.tensor(x) for x in tree_leaves(found)]
        return [unused, *new], results

    tried, results = turned(leaves, turns[0], steps[0])  # a sum begins with the number 0
    leaves = [x.to(y.dtype).expand(y.shape) for x, y in zip(leaves, tried, strict=True)]

    def body(known: list[Tensor], given: tuple[Tensor, Tensor]) -> tuple[Any, Any]:
        new, results = turned(known, *given)
        if spare:
            is_step = given[0] >= 0
            new = [torch.where(is_step, x, y) for x, y in zip(new, known, strict=True)]
        return [x.clone() for x in new], [x.clone() for x in tree_leaves(results)]

    found = tree_leaves(scan(body, [x.clone() for x in leaves], (turns, steps)))
    _, *final = tree_unflatten(found[: len(leaves)], form)
    rest = [x[spare:] for x in found[len(leaves) :]]
    return final, tree_unflatten(rest, tree_structure(results))


#: The functions that rewritten code calls, by their names there.
NAMES: dict[str, Any] = {
    f"{PREFIX}{each.__name__.rstrip('_')}": each
    for each in (
        *(is_open, first, over, unbind, reversed_, zip_, list_, stack, cat, at, put, select),
        *(StepSpan, Steps),
    )
}
