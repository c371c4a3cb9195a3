"""A published artifact beside the original, by code that shares nothing with modelport's proof."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modelport.exporters.formats.registry import find_format
from modelport.exporters.requests.random_inputs import WITHIN, Fill, draw, name_axes, sizes_of
from modelport.gateway.repository import config
from modelport.gateway.types import Array, ModelSignature
from tests.sweep.catalogue import Original

#: A value is wrong if ``|error| > ATOL + RTOL * |reference|``.
ATOL, RTOL = 1e-3, 1e-2

#: An artifact: maps inputs by name to outputs by name.
Session = Callable[[Mapping[str, Array]], Mapping[str, Array]]

SEED = 20240229
BATCHES = (1, 3)
FILLS = (Fill.RANDOM, *WITHIN)
#: Inputs of transformers' models of sound. Models that divide by its variance answer a constant
#: one with rounding errors.
WAVEFORMS = ("input_values",)


class OutputDifference(NamedTuple):
    """The largest error over all inputs, and what is wrong; empty: nothing."""

    max_abs_error: float
    wrong: str


def published(version: Path, format_name: str, original: Original) -> OutputDifference:
    """Run the artifact in ``version`` beside the original, within the published signature."""
    row = find_format(format_name)
    declared = config.signature(config.parse((version.parent / "config.pbtxt").read_text()))
    session = row.open_session(version / row.platform.default_filename, trusted=True)
    return difference(session, declared, original)


def difference(session: Session, declared: ModelSignature, original: Original) -> OutputDifference:
    """Run a session beside the original, over sizes and batches.

    Where a mask has no data, positions of outputs along its axis are not compared: the original
    leaves them to chance.
    """
    worst = 0.0
    for inputs, masks in _inputs(name_axes(declared)):
        expected = _named(_original(original, inputs, declared), declared)
        actual = session(inputs)
        for spec in declared.outputs:
            want, got = expected.get(spec.name), actual.get(spec.name)
            if want is None or got is None:
                return OutputDifference(worst, f"one of the two has no output '{spec.name}'")
            if want.shape != got.shape:
                return OutputDifference(worst, f"'{spec.name}' is {got.shape}, not {want.shape}")
            kept = _defined(spec.dims, masks, want.ndim)
            reference = want.astype(np.float64)
            error = np.abs(reference - got.astype(np.float64))
            error = np.where(np.isnan(reference) & np.isnan(got), 0, error)
            wrong = ~(error <= ATOL + RTOL * np.abs(reference)) & kept
            worst = max(worst, float(np.where(kept, error, 0).max(initial=0)))
            if wrong.any():
                return OutputDifference(worst, f"'{spec.name}' is off by {worst:.2g}")
    return OutputDifference(worst, "")


def _inputs(declared: ModelSignature) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
    """Inputs over sizes of every axis and two batches, and the masks among them by axis.

    At the middle sizes, all values are also at their limits, zero, constant and one-hot.
    """
    rng = np.random.default_rng(SEED)
    batches = [batch for batch in BATCHES if batch <= (declared.max_batch_size or max(BATCHES))]
    for pick in (0, 1, -1):
        sizes = {
            name: sizes_of(axis)[pick % len(sizes_of(axis))] for name, axis in declared.axes.items()
        }
        for batch, fill in itertools.product(batches, FILLS if pick == 1 else (Fill.RANDOM,)):
            fills = dict.fromkeys((spec.name for spec in declared.inputs), fill)
            inputs = draw(declared, batch, sizes, rng, fills, waveforms=WAVEFORMS)
            masks = {}
            for spec in declared.inputs:
                if spec.name.endswith("attention_mask") and isinstance(spec.dims[-1], str):
                    mask = inputs[spec.name]
                    lengths = rng.integers(1, mask.shape[-1], mask.shape[:-1], endpoint=True)
                    mask[...] = np.arange(mask.shape[-1]) < lengths[..., None]
                    masks[spec.dims[-1]] = mask.astype(bool)
            yield inputs, masks


def _defined(dims: tuple[int | str, ...], masks: Mapping[str, Array], rank: int) -> Array:
    for position, dim in enumerate(dims, start=1):
        if isinstance(dim, str) and dim in masks and position < rank:
            mask = masks[dim]
            shape = [mask.shape[0], *[1] * (rank - 1)]
            shape[position] = mask.shape[1]
            return mask.reshape(shape)
    return np.ones([1] * rank, bool)


def _original(original: Original, inputs: Mapping[str, Array], declared: ModelSignature) -> Any:
    import torch

    tensors = {spec.name: torch.tensor(inputs[spec.name]) for spec in declared.inputs}
    with torch.no_grad():
        return original(tensors)


def _named(result: Any, declared: ModelSignature) -> dict[str, Array]:
    """The original's tensors by the artifact's names: by name where it has names, else in order."""
    leaves = dict(_leaves(result, ""))
    names = [spec.name for spec in declared.outputs]
    if not set(names) <= set(leaves):
        leaves = dict(zip(names, leaves.values(), strict=False))
    return {
        name: value.float().numpy() if value.is_floating_point() else value.numpy()
        for name, value in leaves.items()
    }


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        for part in dataclasses.fields(value):
            yield from _leaves(getattr(value, part.name), _joined(name, part.name))
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, _joined(name, str(key)))
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _leaves(part, _joined(name, str(index)))


def _joined(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
