"""Loops of open length, as ``torch``'s scan: what the code of ``loop_rewriting`` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from modelport.exporters.formats.loop_rewriting import PREFIX


class StepSpan(NamedTuple):
    """A slice of fixed length that begins at a step."""

    start: Tensor
    length: int


class Steps:
    """A list whose last elements are the results of a loop of open length, stacked."""

    def __init__(self, first: Sequence[Tensor], rest: Tensor) -> None:
        self._stacked = torch.cat([torch.stack(list(first)), rest]) if first else rest

    def __getitem__(self, index: int) -> Tensor:
        return self._stacked[index]

    def stack(self, dim: int = 0) -> Tensor:
        return self._stacked.movedim(0, dim)

    def cat(self, dim: int = 0) -> Tensor:
        place = dim % (self._stacked.dim() - 1)
        return self._stacked.movedim(0, place).flatten(place, place + 1)


def is_open(bounds: Sequence[Any]) -> bool:
    return any(isinstance(bound, torch.SymInt) for bound in bounds)


def stack(tensors: Any, dim: int = 0) -> Tensor:
    return tensors.stack(dim) if isinstance(tensors, Steps) else torch.stack(tensors, dim)


def cat(tensors: Any, dim: int = 0) -> Tensor:
    return tensors.cat(dim) if isinstance(tensors, Steps) else torch.cat(tensors, dim)


def at(x: Tensor, *parts: Any) -> Tensor:
    """``x[parts]``, where a part may be a step."""
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


def run(
    step: Callable[..., Any], bounds: Sequence[Any], state: list[Any], done: int
) -> tuple[Any, Any]:
    """Repeat ``step`` within ``range(*bounds)``, after the first ``done`` steps.

    A loop that may have no step takes one more, whose results are dropped: scan needs a first one.

    Raises:
        Exception: the loop is irregular.
    """
    first, stop, stride = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if stride not in (1, -1):
        raise NotImplementedError("a loop that leaves out steps")
    first = first + done * stride
    count = (stop - first) * stride
    spare = 0 if statically_known_true(count >= 1) else 1
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

    tried = turned(leaves, turns[0], steps[0])[0]  # a sum begins with the number 0
    leaves = [x.to(y.dtype).expand(y.shape) for x, y in zip(leaves, tried, strict=True)]

    def body(known: list[Tensor], given: tuple[Tensor, Tensor]) -> tuple[Any, Any]:
        new, results = turned(known, *given)
        if spare:
            is_step = given[0] >= 0
            new = [torch.where(is_step, x, y) for x, y in zip(new, known, strict=True)]
        return [x.clone() for x in new], [x.clone() for x in results]

    found = tree_leaves(scan(body, [x.clone() for x in leaves], (turns, steps)))
    _, *final = tree_unflatten(found[: len(leaves)], form)
    return final, [x[spare:] for x in found[len(leaves) :]]


#: The functions that rewritten code calls, by their names there.
NAMES: dict[str, Any] = {
    f"{PREFIX}{each.__name__}": each
    for each in (is_open, stack, cat, at, put, run, StepSpan, Steps)
}
