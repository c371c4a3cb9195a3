"""Inputs generated from a signature: seeded random values, and the corners of its ranges.

Values beyond the corners are those that no range excludes: large ones, infinity, NaN.

In every mask at least one position holds data.

Arrays have the shapes of the model itself (``reshape`` applied), batch dimension first.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np

from modelport.exporters.model_spec import AttentionMask, ModelSpec, Sampler, calling
from modelport.gateway.errors import Unsupported, UsageError
from modelport.gateway.types import NUMPY_DTYPES, Array, Axis, Datatype, ModelSignature, TensorSpec

DEFAULT_LONGEST = 64  # maximum of a dynamic axis without one, counted from its minimum
DEFAULT_LARGEST = 127  # maximum of an integer input without a range
THREE_SIGMA = 3.0  # corners of a float input without a range, which is standard normal

#: The quietest sound of 16-bit samples, and the loudest of standardised ones.
FAINT, LOUD = 2.0**-15, 3.0

#: Share of the machine's memory that the inputs of one batch, or the arrays of a file, may take; a
#: model needs some, too.
MOST_OF_MEMORY = 0.25

#: Width of a range of integers in which every integer is as likely as another.
MOST_EVEN = 1 << 16

WHOLE_ROWS = 0.25  # share of a random mask's rows without padding
LARGEST_ROWS = 0.25  # share of the rows of integers in a wide range that are of the largest order

#: Datatypes that numpy has.
DRAWABLE = frozenset(Datatype) - {Datatype.BF16}

#: Words of random texts: of several scripts, lengths and cases, numbers and punctuation.
WORDS = (
    *("the", "A", "b", "42", "-1.5", "Öl", "東京", "naïve", "don't", "e-mail,", "END."),
    "x" * 40,
)
MOST_WORDS = 8


class Fill(StrEnum):
    """The choice of an input's values; the texts are for messages and certificates."""

    RANDOM = "random"
    MINIMUM = "minimum"
    MAXIMUM = "maximum"
    ZERO = "zero"
    CONSTANT = "constant"
    ONE_HOT = "one-hot"
    LARGE = "about 1e4"
    LARGEST = "the largest float"
    MISSING = "one NaN"
    NAN = "NaN"
    INFINITY = "infinity"
    MINUS_INFINITY = "minus infinity"


#: Values within the ranges, which every artifact must answer as its checkpoint does.
WITHIN = (Fill.MINIMUM, Fill.MAXIMUM, Fill.ZERO, Fill.CONSTANT, Fill.ONE_HOT)
#: Values of float inputs that no range excludes.
BEYOND = tuple(fill for fill in Fill if fill not in (Fill.RANDOM, *WITHIN))

#: Multiple of a standard normal number that is large.
LARGE = 1e4


def model_dims(spec: TensorSpec) -> tuple[int | str, ...]:
    """The dims of the model itself, without the batch; ``reshape`` keeps the order of the axes."""
    if spec.reshape is None:
        return spec.dims
    dynamic = (dim for dim in spec.dims if isinstance(dim, str))
    return tuple(next(dynamic, -1) if dim == -1 else dim for dim in spec.reshape)


def name_axes(signature: ModelSignature) -> ModelSignature:
    """Name every dynamic dim of ``signature``, and bound every axis."""
    axes = dict(signature.axes)

    def named(spec: TensorSpec) -> TensorSpec:
        dims = [f"{spec.name}_dim{i}" if d == -1 else d for i, d in enumerate(spec.dims)]
        for dim in dims:
            if isinstance(dim, str):
                axes.setdefault(dim, Axis(dim))
        return replace(spec, dims=tuple(dims))

    inputs = tuple(named(spec) for spec in signature.inputs)
    bounded = {
        name: axis if axis.maximum is not None else replace(axis, maximum=_longest(axis))
        for name, axis in axes.items()
    }
    return replace(signature, inputs=inputs, axes=bounded)


def _longest(axis: Axis) -> int:
    return axis.minimum + DEFAULT_LONGEST


def sizes_of(axis: Axis) -> tuple[int, ...]:
    """The shortest, a middle and the longest size of ``axis``."""
    longest = _longest(axis) if axis.maximum is None else axis.maximum
    return tuple(sorted({axis.minimum, (axis.minimum + longest) // 2, longest}))


def draw(
    signature: ModelSignature,
    batch: int,
    sizes: Mapping[str, int],
    rng: np.random.Generator,
    fills: Mapping[str, Fill] | None = None,
    masks: Sequence[AttentionMask] = (),
    waveforms: Collection[str] = (),
) -> dict[str, Array]:
    """Generate one batch of inputs by name.

    Args:
        batch: the batch size; unused if the model does not batch.
        sizes: the size of every dynamic axis.
        fills: the fill of each input; random for an input that is not named. A mask is at its
            minimum with data at one position, and at its maximum with data at all.
        waveforms: inputs that are sound; at the minimum faint, at the maximum a square wave. A
            constant other than 0 is not a sound: it has no variance, so that models that
            divide by it would answer with rounding errors.

    Raises:
        Unsupported: an input's datatype cannot be drawn.
        UsageError: the inputs are too large for this machine.
    """
    leading = (batch,) if signature.max_batch_size else ()
    _check_memory(signature, leading, sizes)
    inputs = {}
    by_input = {mask.input: mask for mask in masks}
    for spec in signature.inputs:
        if spec.datatype not in DRAWABLE:
            raise Unsupported(
                f"input '{spec.name}' has datatype {spec.datatype}, which cannot be exported; "
                f"use one of {', '.join(sorted(DRAWABLE))}"
            )
        dims = tuple(sizes[d] if isinstance(d, str) else d for d in model_dims(spec))
        fill = (fills or {}).get(spec.name, Fill.RANDOM)
        mask = by_input.get(spec.name)
        if spec.name in waveforms and fill is Fill.CONSTANT:
            fill = Fill.RANDOM
        if spec.name in waveforms and fill in (Fill.MINIMUM, Fill.MAXIMUM):
            wave = np.where(rng.random(leading + dims) < 0.5, -1.0, 1.0)
            volume = FAINT if fill is Fill.MINIMUM else LOUD
            inputs[spec.name] = (volume * wave).astype(NUMPY_DTYPES[spec.datatype])
        elif mask is None:
            inputs[spec.name] = _values(spec, leading + dims, sizes, rng, fill)
        elif counts_positions(spec):
            at_least_one = replace(spec, minimum=max(1, spec.minimum or 0))
            inputs[spec.name] = _values(at_least_one, leading + dims, sizes, rng, fill)
        else:
            positions = _positions(mask.padding, leading + dims, rng, fill)
            inputs[spec.name] = positions.astype(NUMPY_DTYPES[spec.datatype])
    return inputs


def _check_memory(
    signature: ModelSignature, leading: tuple[int, ...], sizes: Mapping[str, int]
) -> None:
    shapes = {
        spec.name: [*leading, *(sizes[d] if isinstance(d, str) else d for d in model_dims(spec))]
        for spec in signature.inputs
    }
    needed = sum(
        math.prod(shapes[spec.name]) * NUMPY_DTYPES[spec.datatype].itemsize
        for spec in signature.inputs
    )
    if needed > MOST_OF_MEMORY * physical_memory():
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise UsageError(
            f"the inputs of one batch ({listed}) take {needed / 1e9:.1f} GB, too much of this "
            "machine's memory; lower --max-batch-size, or the sizes of the inputs"
        )


def physical_memory() -> int:
    """The bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def counts_positions(spec: TensorSpec) -> bool:
    """Whether the values of ``spec`` are lengths, which end at the size of an axis."""
    return isinstance(spec.maximum, str)


def _positions(padding: str, shape: tuple[int, ...], rng: np.random.Generator, fill: Fill) -> Array:
    """The positions with data: one or more of each row, and all of every fourth row or so."""
    *rows, size = shape
    if fill is Fill.MAXIMUM or not size:
        return np.ones(shape, bool)
    if fill is Fill.MINIMUM:
        lengths = np.ones(rows, np.int64)
    else:
        whole = rng.random(rows) < WHOLE_ROWS
        lengths = np.where(whole, size, rng.integers(1, size, rows, endpoint=True))
    held = np.arange(size) < lengths[..., None]
    if padding == "left":
        return held[..., ::-1]
    return rng.permuted(held, axis=-1) if padding == "any" else held


def sampler(spec: ModelSpec) -> Sampler:
    """The generator of a model's random inputs."""
    if spec.sample is None:
        return functools.partial(draw, masks=spec.masks)
    return functools.partial(_sampled, spec.name, spec.sample)


def _sampled(
    model: str,
    sample: Sampler,
    signature: ModelSignature,
    batch: int,
    sizes: Mapping[str, int],
    rng: np.random.Generator,
) -> dict[str, Array]:
    """The inputs that a model's own function generates."""
    failure = f"the random inputs of model '{model}' fail for a batch of {batch}"
    with calling(failure, "'sample' of its ModelSpec"):
        return sample(signature, batch, sizes, rng)


def unpadded_sampler(spec: ModelSpec) -> Sampler:
    """A generator of inputs for which every output is defined everywhere."""
    wanted = sampler(spec)

    def sample(
        signature: ModelSignature, batch: int, sizes: Mapping[str, int], rng: np.random.Generator
    ) -> dict[str, Array]:
        inputs = wanted(signature, batch, sizes, rng)
        whole = {mask.input: Fill.MAXIMUM for mask in spec.masks if mask.outputs}
        if whole:
            filled = draw(signature, batch, sizes, rng, whole, spec.masks)
            inputs |= {name: filled[name] for name in whole}
        return inputs

    return sample


def _values(
    spec: TensorSpec,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    rng: np.random.Generator,
    fill: Fill,
) -> Array:
    dtype = NUMPY_DTYPES[spec.datatype]
    if spec.datatype is Datatype.BYTES:
        return texts(shape, rng, fill)
    if 0 in shape:
        return np.zeros(shape, dtype)
    low, high = _bounds(spec, sizes)
    zero = min(max(0, low), high)
    if fill in (Fill.MINIMUM, Fill.MAXIMUM, Fill.ZERO):
        value = {Fill.MINIMUM: low, Fill.MAXIMUM: high, Fill.ZERO: zero}[fill]
        return np.full(shape, value, dtype)
    if fill is Fill.CONSTANT:
        return np.full(shape, _values(spec, (), sizes, rng, Fill.RANDOM), dtype)
    if fill is Fill.ONE_HOT:
        found = np.full(shape, zero, dtype)
        found.flat[rng.integers(found.size)] = high
        return found
    if dtype.kind != "f":
        return _integers(int(low), int(high), shape, dtype, rng)
    if spec.minimum is None and spec.maximum is None:
        found = np.asarray(rng.standard_normal(shape).astype(dtype))
    else:
        found = np.asarray(rng.uniform(low, high, shape).astype(dtype))
    return found if fill is Fill.RANDOM else _beyond(found, spec, rng, fill)


def texts(
    shape: tuple[int, ...],
    rng: np.random.Generator,
    fill: Fill = Fill.RANDOM,
    words: Sequence[str] = WORDS,
) -> Array:
    """Texts of random words; the least has none, the largest is long."""
    found = np.full(shape, b"", object)
    flat = found.reshape(-1)
    size = flat.size
    if not size:
        return found
    if fill is Fill.MAXIMUM:
        flat[:] = [" ".join(words[: MOST_WORDS**2]).encode()] * size
    elif fill is Fill.ZERO:
        flat[:] = [b"0"] * size
    elif fill is Fill.CONSTANT:
        flat[:] = [_text(words, rng)] * size
    elif fill is Fill.ONE_HOT:
        flat[rng.integers(size)] = _text(words, rng)
    elif fill is not Fill.MINIMUM:
        flat[:] = [_text(words, rng) for _ in range(size)]
    return found


def _text(words: Sequence[str], rng: np.random.Generator) -> bytes:
    return " ".join(
        words[i] for i in rng.integers(len(words), size=rng.integers(1, MOST_WORDS))
    ).encode()


def _integers(
    low: int, high: int, shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator
) -> Array:
    """Integers of every order of magnitude in a wide range around 0, and evenly in any other.

    In a quarter of the rows, those of a wide range are of the largest order, too: they alone show
    what adds them up in floats.
    """
    if dtype.kind == "b":
        return rng.integers(low, high, shape, endpoint=True).astype(dtype)
    found = rng.integers(low, high, shape, dtype.type, endpoint=True)
    if high - low <= MOST_EVEN or not low <= 0 <= high:
        return np.asarray(found)
    shifts = rng.integers(0, (high - low).bit_length(), shape)
    shifts[rng.random(shape[:1]) < LARGEST_ROWS] = 0
    return np.asarray(found >> shifts.astype(dtype))


def _beyond(values: Array, spec: TensorSpec, rng: np.random.Generator, fill: Fill) -> Array:
    """Random ``values`` as far beyond the corners as the range, open on one side, allows."""
    if spec.minimum is not None and spec.maximum is not None:
        return values
    if fill in (Fill.NAN, Fill.MISSING):
        if spec.minimum is None and spec.maximum is None:  # no range has it
            where = slice(None) if fill is Fill.NAN else rng.integers(values.size)
            values.reshape(-1)[where] = np.nan
        return values
    found = {
        Fill.LARGE: values * np.float64(LARGE),
        Fill.LARGEST: np.copysign(np.finfo(values.dtype).max, values),
        Fill.INFINITY: np.full_like(values, np.inf),
        Fill.MINUS_INFINITY: np.full_like(values, -np.inf),
    }[fill]
    low = -np.inf if spec.minimum is None else spec.minimum
    high = np.inf if spec.maximum is None else spec.maximum
    with np.errstate(over="ignore"):  # half precision has no larger number than 65504
        return np.asarray(np.clip(found, low, high), values.dtype)


def is_open(spec: TensorSpec) -> bool:
    """Whether the values of ``spec`` are floats without a range, or with one that is open."""
    is_float = NUMPY_DTYPES[spec.datatype].kind == "f"
    return is_float and (spec.minimum is None or spec.maximum is None)


def _bounds(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[float, float]:
    """The declared range; an open side is closed at a width that suits the datatype."""
    low = spec.minimum
    high = sizes[spec.maximum] if isinstance(spec.maximum, str) else spec.maximum
    kind = NUMPY_DTYPES[spec.datatype].kind
    if kind == "b":
        return 0, 1
    if low is None and high is None:
        return (-THREE_SIGMA, THREE_SIGMA) if kind == "f" else (0, DEFAULT_LARGEST)
    width = 2 * THREE_SIGMA if kind == "f" else DEFAULT_LARGEST
    if low is None:
        assert high is not None
        low = high - width if kind == "f" else min(0, high)
    if high is None:
        high = low + width
        if kind in "iu":
            high = min(high, np.iinfo(NUMPY_DTYPES[spec.datatype]).max)
    return low, high


def corners(signature: ModelSignature) -> Iterator[tuple[dict[str, int], dict[str, Fill]]]:
    """Yield the axis sizes and fills of the edge inputs.

    Every axis is tried at its shortest and at its longest. At each, all inputs are at their
    minimum, then all at their maximum, then each input alone is at either while the others are
    random. At the shortest, all inputs have the other values of ``WITHIN``, too.
    """
    names = [spec.name for spec in signature.inputs]
    shortest, longest = (
        {name: sizes_of(axis)[pick] for name, axis in signature.axes.items()} for pick in (0, -1)
    )
    for sizes in [shortest] if longest == shortest else [shortest, longest]:
        for fill in WITHIN if sizes is shortest else WITHIN[:2]:
            if fill is Fill.ZERO and all(_bounds(x, sizes)[0] == 0 for x in signature.inputs):
                continue  # it is the minimum
            yield sizes, dict.fromkeys(names, fill)
            if len(names) > 1 and fill in WITHIN[:2]:
                yield from ((sizes, {name: fill}) for name in names)
