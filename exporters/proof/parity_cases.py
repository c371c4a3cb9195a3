"""Inputs of a parity proof: batch sizes, axis sizes, corners of ranges, values beyond them, random
inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.requests.random_inputs import (
    BEYOND,
    Fill,
    corners,
    draw,
    is_open,
    model_dims,
    name_axes,
    sampler,
    sizes_of,
)
from modelport.gateway.types import Array, ModelSignature

#: Batch sizes that are always tried, besides the largest.
BATCH_SIZES = (1, 2, 8)

#: Largest batch of different edge inputs. The last is in it twice: equal rows are an edge, too.
EDGE_ROWS = 8

#: The fill of each input; random for an input that is not named.
Fills = Mapping[str, Fill]


@dataclass(frozen=True, slots=True)
class ParityCase:
    """One batch of inputs and its place in the plan; ``batch`` is 0 if the model does not batch.

    Attributes:
        edges: the fills of each row, for edge inputs; none for random inputs.
        beyond: the edges are values beyond the corners of ranges.
        neighbours: other inputs of the same shapes, to replace some of the rows by.
        work: the elements of all inputs up to this one's, and of the whole plan.
    """

    batch: int
    sizes: Mapping[str, int]
    inputs: Mapping[str, Array]
    edges: tuple[Fills, ...] = ()
    beyond: bool = False
    neighbours: Mapping[str, Array] | None = None
    work: tuple[int, int] = (0, 0)

    @property
    def kinds(self) -> list[str]:
        """For each row, the kind of its values."""
        return [next(iter(fills.values()), Fill.RANDOM).value for fills in self.edges]

    def __str__(self) -> str:
        parts = [f"batch {self.batch}"] if self.batch else []
        parts += [f"{name} {size}" for name, size in self.sizes.items()]
        if self.edges:
            kinds = list(dict.fromkeys(self.kinds))
            parts.append(f"edge input {kinds[0]}" if len(kinds) == 1 else "edge inputs")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class _Outline:
    """A case whose inputs are not drawn yet; no edges: random inputs."""

    batch: int
    sizes: Mapping[str, int]
    edges: tuple[Fills, ...] = ()
    beyond: bool = False

    def elements(self, signature: ModelSignature) -> int:
        """The elements of all inputs."""
        shapes = (
            [self.sizes[dim] if isinstance(dim, str) else max(dim, 1) for dim in model_dims(spec)]
            for spec in signature.inputs
        )
        return sum(max(self.batch, 1) * math.prod(shape) for shape in shapes)


def plan(
    signature: ModelSignature, spec: ModelSpec, samples: int, seed: int
) -> Iterator[ParityCase]:
    """Yield the grid of batch and axis sizes, the edges, then random sizes up to ``samples``."""
    signature = name_axes(signature)
    rng = np.random.default_rng(seed)
    sample = sampler(spec)
    outlines = list(_outlines(signature, spec, samples, seed))
    work = list(itertools.accumulate(each.elements(signature) for each in outlines))

    def drawn(fills: Sequence[Fills], sizes: Mapping[str, int]) -> dict[str, Array]:
        """Rows of these fills."""
        rows = [
            draw(signature, 1, sizes, rng, each, spec.masks, spec.waveforms)
            if each
            else sample(signature, 1, sizes, rng)
            for each in fills
        ]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    for outline, done in zip(outlines, work, strict=True):
        batch, sizes, edges = outline.batch, outline.sizes, outline.edges
        neighbours = None
        if not edges:
            inputs = sample(signature, batch, sizes, rng)
        elif not batch:
            inputs = draw(signature, 0, sizes, rng, edges[0], spec.masks, spec.waveforms)
        elif batch == 1:
            inputs = drawn(edges, sizes)
        else:
            found = drawn(edges[:-1], sizes)
            inputs = {name: np.concatenate([x, x[-1:]]) for name, x in found.items()}
            others = itertools.cycle(_beyond(signature) or [{}])
            neighbours = drawn([next(others) for _ in edges], sizes)
        yield ParityCase(batch, sizes, inputs, edges, outline.beyond, neighbours, (done, work[-1]))


def _outlines(
    signature: ModelSignature, spec: ModelSpec, samples: int, seed: int
) -> Iterator[_Outline]:
    rng = np.random.default_rng([seed, 1])  # independent of the values
    largest = signature.max_batch_size
    batches = sorted({largest, *(b for b in BATCH_SIZES if b <= largest)}) if largest else [0]
    done = 0
    for sizes in _grid(signature):
        for batch in batches:
            yield _Outline(batch, sizes)
            done += batch or 1
    if not spec.recorded:
        yield from _edges(signature)
    while done < max(samples, spec.recorded):
        batch = batches[int(rng.integers(len(batches)))]
        sizes = {
            name: int(rng.integers(axis.minimum, sizes_of(axis)[-1], endpoint=True))
            for name, axis in signature.axes.items()
        }
        yield _Outline(batch, sizes)
        done += batch or 1


def _edges(signature: ModelSignature) -> Iterator[_Outline]:
    """Each edge alone, then those of the shortest sizes beside each other and random rows."""
    alone = [(sizes, fills) for sizes, fills in corners(signature)]
    shortest = alone[0][0]
    largest = signature.max_batch_size
    yield from (_Outline(min(largest, 1), sizes, (fills,)) for sizes, fills in alone)
    within = [fills for sizes, fills in alone if sizes == shortest]
    if largest > 1:
        yield from _beside([*within, {}], shortest, largest)
    for fills in _beyond(signature):
        yield _Outline(min(largest, 1), shortest, (fills,), beyond=True)
    if largest > 1:
        large = [fills for fills in _beyond(signature) if Fill.LARGE in fills.values()]
        for outline in _beside(large * 3, shortest, largest):
            yield replace(outline, beyond=True)


def _beside(rows: Sequence[Fills], sizes: Mapping[str, int], largest: int) -> Iterator[_Outline]:
    """Batches of ``rows``, the last of each twice."""
    step = min(largest, EDGE_ROWS) - 1
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        yield _Outline(len(chunk) + 1, sizes, (*chunk, chunk[-1]))


def _beyond(signature: ModelSignature) -> list[Fills]:
    """The edges of inputs whose values no range bounds."""
    names = [spec.name for spec in signature.inputs if is_open(spec)]
    return [dict.fromkeys(names, fill) for fill in BEYOND] if names else []


def _grid(signature: ModelSignature) -> list[dict[str, int]]:
    """Axis sizes: all shortest, all longest, all in the middle; then each axis alone."""
    tried = {name: sizes_of(axis) for name, axis in signature.axes.items()}
    middle = {name: sizes[len(sizes) // 2] for name, sizes in tried.items()}
    grid = [{name: sizes[pick] for name, sizes in tried.items()} for pick in (0, -1)]
    grid.append(middle)
    grid += [{**middle, name: size} for name, sizes in tried.items() for size in sizes]
    return [sizes for index, sizes in enumerate(grid) if sizes not in grid[:index]]
