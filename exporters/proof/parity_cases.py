"""Inputs of a parity proof: batch sizes, axis sizes, corners of ranges, random inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.requests.random_inputs import corners, draw, name_axes, sampler, sizes_of
from modelport.gateway.types import Array, ModelSignature

#: Batch sizes that are always tried, besides the largest.
BATCH_SIZES = (1, 2, 8)

#: Edge inputs run at this many of the smallest batch sizes, as an edge concerns values.
EDGE_BATCHES = 2


@dataclass(frozen=True, slots=True)
class ParityCase:
    """One batch of inputs and its place in the plan; ``batch`` is 0 if the model does not batch."""

    batch: int
    sizes: Mapping[str, int]
    inputs: Mapping[str, Array]
    edge: bool = False

    def __str__(self) -> str:
        parts = [f"batch {self.batch}"] if self.batch else []
        parts += [f"{name} {size}" for name, size in self.sizes.items()]
        return ", ".join(parts) + (", edge input" if self.edge else "")


def plan(
    signature: ModelSignature, spec: ModelSpec, samples: int, seed: int
) -> Iterator[ParityCase]:
    """Yield the grid of batch and axis sizes, the edges, then random sizes up to ``samples``."""
    signature = name_axes(signature)
    rng = np.random.default_rng(seed)
    sample = sampler(spec)
    largest = signature.max_batch_size
    batches = sorted({largest, *(b for b in BATCH_SIZES if b <= largest)}) if largest else [0]
    done = 0
    for sizes in _grid(signature):
        for batch in batches:
            yield ParityCase(batch, sizes, sample(signature, batch, sizes, rng))
            done += batch or 1
    for sizes, fills in () if spec.recorded else corners(signature):
        for batch in batches[:EDGE_BATCHES]:
            inputs = draw(signature, batch, sizes, rng, fills, spec.masks, spec.waveforms)
            yield ParityCase(batch, sizes, inputs, edge=True)
    while done < max(samples, spec.recorded):
        batch = batches[int(rng.integers(len(batches)))]
        sizes = {
            name: int(rng.integers(axis.minimum, sizes_of(axis)[-1], endpoint=True))
            for name, axis in signature.axes.items()
        }
        yield ParityCase(batch, sizes, sample(signature, batch, sizes, rng))
        done += batch or 1


def _grid(signature: ModelSignature) -> list[dict[str, int]]:
    """Axis sizes: all shortest, all longest, all in the middle; then each axis alone."""
    tried = {name: sizes_of(axis) for name, axis in signature.axes.items()}
    middle = {name: sizes[len(sizes) // 2] for name, sizes in tried.items()}
    grid = [{name: sizes[pick] for name, sizes in tried.items()} for pick in (0, -1)]
    grid.append(middle)
    grid += [{**middle, name: size} for name, sizes in tried.items() for size in sizes]
    return [sizes for index, sizes in enumerate(grid) if sizes not in grid[:index]]
