"""Comparison of two models' weights, tensor by tensor, with a guess at each difference's cause."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from modelport.exporters.keras_ports import Link
from modelport.gateway.types import Array

#: Tolerance for float32 values that were only moved; a conversion changes no bit.
RTOL = 1e-6
ATOL = 1e-9


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor on both sides, in PyTorch's layout.

    Attributes:
        layer: the layer's name.
        tensor: the Keras variable, or the PyTorch key of a tensor that only one side has.
        norms: L2, source then target; None if a side lacks the tensor.
        max_abs_error: None if the shapes differ, or a value is not a number.
        verdict: empty if both are equal; otherwise a description of the difference.
        confused: the place of the tensor and the place its values belong to, if they look
            misplaced; the paths end where they part, so that two swapped blocks are named and not
            each layer in them.
    """

    layer: str
    tensor: str
    source_shape: tuple[int, ...] | None
    target_shape: tuple[int, ...] | None
    norms: tuple[float | None, float | None]
    max_abs_error: float | None = None
    verdict: str = ""
    confused: tuple[str, ...] = ()


def torch_parts(state: Mapping[str, Array], links: Sequence[Link]) -> dict[str, Array]:
    """The values of a state dict by Keras path; a key without a link keeps its own name."""
    parts = {key: value for key, value in state.items() if key not in {x.torch_key for x in links}}
    for link in links:
        if link.torch_key not in state:
            continue
        value = state[link.torch_key]
        index, count = link.part
        rows = value.shape[0] // count if value.ndim and value.shape[0] % count == 0 else 0
        parts[link.keras_path] = value[index * rows : (index + 1) * rows] if rows else value
    return parts


def keras_parts(values: Mapping[str, Array], links: Sequence[Link]) -> dict[str, Array]:
    """Keras values by path, in PyTorch's layout."""
    to_torch = {link.keras_path: link.to_torch for link in links}
    parts = {}
    for path, value in values.items():
        try:
            parts[path] = to_torch[path](value) if path in to_torch else value
        except ValueError:  # another number of dimensions
            parts[path] = value
    return parts


def compare(
    links: Sequence[Link], source: Mapping[str, Array], target: Mapping[str, Array]
) -> list[TensorRow]:
    """One row for every tensor of either side, in the order of computation."""
    layers = {link.keras_path: link.layer for link in links}
    rest = [path for path in {**source, **target} if path not in layers]
    rows = [_row(layers.get(p, p), p, source.get(p), target.get(p)) for p in [*layers, *rest]]
    return [_explain(row, layers, source, target) if row.verdict else row for row in rows]


def _row(layer: str, path: str, a: Array | None, b: Array | None) -> TensorRow:
    error, verdict = None, ""
    if a is None or b is None:
        verdict = "is missing" if b is None else "is not in the other model"
    elif a.shape != b.shape:
        verdict = f"has shape {list(b.shape)}, not {list(a.shape)}"
    else:
        if not np.isfinite(b).all():
            verdict = "holds values that are not finite"
        else:
            error = float(np.abs(a.astype(np.float64) - b).max(initial=0.0))
            verdict = "" if _close(a, b) else f"differs by up to {error:.3g}"
    shapes = (None if a is None else a.shape, None if b is None else b.shape)
    return TensorRow(layer, path, *shapes, (_norm(a), _norm(b)), error, verdict)


def _norm(value: Array | None) -> float | None:
    return None if value is None else float(np.linalg.norm(value.astype(np.float64)))


def _close(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool(np.allclose(b, a, rtol=RTOL, atol=ATOL))


def _explain(
    row: TensorRow,
    layers: Mapping[str, str],
    source: Mapping[str, Array],
    target: Mapping[str, Array],
) -> TensorRow:
    a, b = source.get(row.tensor), target.get(row.tensor)
    if a is None or b is None:
        return row
    if _transposed(a, b):
        return replace(row, verdict="looks transposed")
    if row.max_abs_error is None:
        return row
    if not b.any():
        return replace(row, verdict="looks dropped: it is all zeros")
    return next(_misplaced(row, layers, source, target), row)


def _transposed(a: Array, b: Array) -> bool:
    orders = itertools.permutations(range(a.ndim))
    return any(_close(a.transpose(order), b) for order in orders if order != (*range(a.ndim),))


def _misplaced(
    row: TensorRow,
    layers: Mapping[str, str],
    source: Mapping[str, Array],
    target: Mapping[str, Array],
) -> Iterator[TensorRow]:
    a, b = source[row.tensor], target[row.tensor]
    variable = row.tensor.rpartition("/")[2]
    for path, layer in layers.items():
        other = source.get(path)
        if path == row.tensor or other is None or path.rpartition("/")[2] != variable:
            continue
        if _close(other, b):
            swapped = path in target and _close(a, target[path])
            here, there = _parting(row.layer, layer)
            verdict = f"looks {'swapped with' if swapped else 'copied from'} '{there}'"
            yield replace(row, verdict=verdict, confused=(here, there))


def _parting(a: str, b: str) -> tuple[str, str]:
    """Two paths, each cut where they part."""
    one, other = a.split("."), b.split(".")
    pairs = zip(one, other, strict=False)
    i = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(one), len(other)) - 1)
    return ".".join(one[: i + 1]), ".".join(other[: i + 1])


def account(rows: Sequence[TensorRow]) -> str:
    """A short description of the first difference; empty if there is none."""
    wrong = [row for row in rows if row.verdict]
    if not wrong:
        return ""
    first = wrong[0]
    if first.confused:
        text = f"layer '{first.confused[0]}' {first.verdict}"
        rest = sum(set(row.confused) != set(first.confused) for row in wrong)
    elif first.layer == first.tensor:
        text, rest = f"tensor '{first.tensor}' {first.verdict}", len(wrong) - 1
    else:
        text = f"layer '{first.layer}': {first.tensor.rpartition('/')[2]} {first.verdict}"
        rest = len(wrong) - 1
    return f"{text}, and {rest} more tensor{'s' * (rest > 1)} differ" if rest else text
