"""Inputs of a parity proof: batch sizes, axis sizes, corners of ranges, random inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.requests.random_inputs import (
    Fill,
    corners,
    draw,
    model_dims,
    name_axes,
    sampler,
    sizes_of,
)
from modelport.gateway.types import Array, ModelSignature

#: Batch sizes that are always tried, besides the largest.
BATCH_SIZES = (1, 2, 8)

#: Edge inputs run at this many of the smallest batch sizes at the shortest sizes, and at the
#: smallest alone at longer ones: an edge concerns values, and the grid tries each batch size there.
EDGE_BATCHES = 2


@dataclass(frozen=True, slots=True)
class ParityCase:
    """One batch of inputs and its place in the plan; ``batch`` is 0 if the model does not batch.

    Attributes:
        work: the elements of all inputs up to this one's, and of the whole plan.
    """

    batch: int
    sizes: Mapping[str, int]
    inputs: Mapping[str, Array]
    edge: bool = False
    work: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        parts = [f"batch {self.batch}"] if self.batch else []
        parts += [f"{name} {size}" for name, size in self.sizes.items()]
        return ", ".join(parts) + (", edge input" if self.edge else "")


@dataclass(frozen=True, slots=True)
class _Outline:
    """A case whose inputs are not drawn yet; ``fills`` None: random inputs."""

    batch: int
    sizes: Mapping[str, int]
    fills: Mapping[str, Fill] | None = None

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
    for outline, done in zip(outlines, work, strict=True):
        batch, sizes, fills = outline.batch, outline.sizes, outline.fills
        if fills is None:
            inputs = sample(signature, batch, sizes, rng)
        else:
            inputs = draw(signature, batch, sizes, rng, fills, spec.masks, spec.waveforms)
        yield ParityCase(batch, sizes, inputs, fills is not None, (done, work[-1]))


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
        yield from _edges(signature, batches[:EDGE_BATCHES])
    while done < max(samples, spec.recorded):
        batch = batches[int(rng.integers(len(batches)))]
        sizes = {
            name: int(rng.integers(axis.minimum, sizes_of(axis)[-1], endpoint=True))
            for name, axis in signature.axes.items()
        }
        yield _Outline(batch, sizes)
        done += batch or 1


def _edges(signature: ModelSignature, batches: Sequence[int]) -> Iterator[_Outline]:
    shortest = None
    for sizes, fills in corners(signature):
        shortest = sizes if shortest is None else shortest
        for batch in batches if sizes == shortest else batches[:1]:
            yield _Outline(batch, sizes, fills)


def _grid(signature: ModelSignature) -> list[dict[str, int]]:
    """Axis sizes: all shortest, all longest, all in the middle; then each axis alone."""
    tried = {name: sizes_of(axis) for name, axis in signature.axes.items()}
    middle = {name: sizes[len(sizes) // 2] for name, sizes in tried.items()}
    grid = [{name: sizes[pick] for name, sizes in tried.items()} for pick in (0, -1)]
    grid.append(middle)
    grid += [{**middle, name: size} for name, sizes in tried.items() for size in sizes]
    return [sizes for index, sizes in enumerate(grid) if sizes not in grid[:index]]
