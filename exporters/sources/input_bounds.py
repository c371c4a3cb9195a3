"""Axes and integer ranges of a model's inputs, found by running the model.

TensorFlow marks a dimension as open, without saying which dimensions are equal or how long they may
be; and an input as integer, without the size of its vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from modelport.exporters.loaded_model import Reference
from modelport.exporters.model_spec import AttentionMask
from modelport.exporters.requests.random_inputs import (
    DEFAULT_LARGEST,
    DEFAULT_LONGEST,
    Fill,
    counts_positions,
    draw,
    model_dims,
    name_axes,
    sizes_of,
)
from modelport.exporters.runtime.memory_limit import more_memory
from modelport.exporters.sources.tensor_flags import parse_tensors
from modelport.gateway.errors import Unsupported, UsageError
from modelport.gateway.types import NUMPY_DTYPES, Array, Axis, Datatype, ModelSignature, TensorSpec

#: Sizes to try until the model runs; common networks shrink images by up to 32.
LADDER = (8, 32, 64, 16, 4, 2)

BATCH = 2

#: Values to try on the way to a datatype's largest: each takes at most 16 times the time, and the
#: memory, that the one before it took.
STEPS = tuple((1 << bits) - 1 for bits in range(7, 64, 4))
#: Memory that a value may make the model take, and the processor's time.
MOST_MEMORY, MOST_SECONDS = 4 << 30, 10.0
#: Values from which the search begins, until the model runs: not every model takes 0.
STARTS = (0, 1, DEFAULT_LARGEST)

Sizes = Mapping[str, int]


def declared(signature: ModelSignature, flags: Sequence[str]) -> ModelSignature:
    """``signature`` with the sizes and ranges that ``--input`` declares for open dimensions.

    Raises:
        UsageError: a declaration is malformed, or contradicts the model.
    """
    specs, _, axes = parse_tensors(flags)
    inputs = {spec.name: spec for spec in signature.inputs}
    for spec in specs:
        own = inputs.get(spec.name)
        if own is None:
            raise UsageError(
                f"--input '{spec.name}' is not an input of the model; its inputs are "
                f"{', '.join(inputs)}"
            )
        fits = len(own.dims) == len(spec.dims) and all(
            known in (-1, given) for known, given in zip(own.dims, spec.dims, strict=True)
        )
        if own.datatype is not spec.datatype or not fits:
            raise UsageError(
                f"--input '{spec.name}' contradicts the model, which declares {written(own)}; "
                "give sizes or axes for its open dimensions, written as -1 here"
            )
        inputs[spec.name] = replace(own, dims=spec.dims, minimum=spec.minimum, maximum=spec.maximum)
    return replace(signature, inputs=tuple(inputs.values()), axes=axes)


def written(spec: TensorSpec, size: str = "-1") -> str:
    """``spec`` as ``--input`` takes it, with ``size`` for open dimensions."""
    dims = (size if dim == -1 or isinstance(dim, str) else str(dim) for dim in spec.dims)
    return f"{spec.name}:{spec.datatype}[{','.join(dims)}]"


def settle(
    signature: ModelSignature, reference: Reference, masks: Sequence[AttentionMask] = ()
) -> ModelSignature:
    """Add names and bounds for open dimensions, and the ranges of masks, to ``signature``.

    Dimensions at the same place of several inputs are one axis if the model runs only with equal
    sizes; or all dimensions are, as the nodes of a graph and both sides of its matrix. A bound is
    declared where the model stops running.

    Raises:
        Unsupported: the model runs at none of the sizes tried.
    """
    reasons: list[Exception] = []
    for axis_of in (_own_axis, _axis_by_place, _one_axis):
        named = _named(signature, axis_of)
        given = {name: sizes_of(axis)[0] for name, axis in signature.axes.items()}
        dims = dict.fromkeys(d for s in named.inputs for d in s.dims if isinstance(d, str))
        names = [name for name in dims if name not in given]
        trial = _Trial(named, reference, masks, reasons)
        tried = ({**given, **sizes} for sizes in _candidates(names, axis_of is not _own_axis))
        sizes = next((sizes for sizes in tried if trial.runs(sizes)), None)
        if sizes is not None:
            axes = {name: _axis(name, sizes, trial) for name in names}
            for name, axis in signature.axes.items():
                _check_longest(axis, sizes, trial, reasons)
                axes[name] = axis
            flags = {mask.input for mask in masks}
            inputs = tuple(
                replace(spec, minimum=0, maximum=1) if spec.name in flags else spec
                for spec in named.inputs
            )
            return replace(named, axes=axes, inputs=inputs)
    open_ones = [spec for spec in signature.inputs if -1 in spec.dims]
    asked = " ".join(f"--input '{written(spec, '512')}'" for spec in open_ones or signature.inputs)
    raise Unsupported(
        f"the model does not run at any size of its inputs that was tried ({_said(reasons)}); "
        f"declare sizes that it runs at, such as {asked}, or an axis with bounds, as rows=100..600"
    )


def _check_longest(axis: Axis, sizes: Sizes, trial: _Trial, reasons: list[Exception]) -> None:
    longest = sizes_of(axis)[-1]
    if not trial.runs({**sizes, axis.name: longest}):
        raise UsageError(
            f"the model does not run with '{axis.name}' of {longest}, to which --input declares "
            f"it ({_said(reasons)}); give it other bounds"
        )


def _said(reasons: Sequence[Exception]) -> str:
    """The last reason, without what TensorFlow puts around it: names of its functions and calls.

    Keras writes the reason in bold type.
    """
    text = " ".join(str(reasons[-1]).split())
    text = text.partition("\x1b[1m")[2].partition("\x1b[0m")[0] or text
    return text.rpartition("}} ")[2].partition(" [Op:")[0][:200]


def with_ranges(
    signature: ModelSignature, reference: Reference, masks: Sequence[AttentionMask] = ()
) -> tuple[ModelSignature, frozenset[str]]:
    """Add ranges for integers without one: the values for which the model runs.

    The lowest number of a datatype has no negative, and its quotient by -1 ends the process, so
    that it is in the range of a model's only input alone.

    Returns:
        The signature, and the names of the inputs whose ranges were found.
    """
    taken = {mask.input for mask in masks}
    wanted = [x for x in signature.inputs if _is_without_range(x) and x.name not in taken]
    if not wanted:
        return signature, frozenset()
    named = name_axes(signature)
    sizes = {name: sizes_of(axis)[0] for name, axis in named.axes.items()}
    trial = _Trial(named, reference, masks, [])
    starts = ({x.name: _within(x, value) for x in wanted} for value in STARTS)
    start = next((values for values in starts if trial.runs(sizes, values)), None)
    only = len(signature.inputs) == 1
    found = {x.name: _ranged(x, sizes, trial, start, only) for x in wanted}
    inputs = tuple(found.get(spec.name, spec) for spec in signature.inputs)
    return replace(signature, inputs=inputs), frozenset(found)


def _is_without_range(spec: TensorSpec) -> bool:
    is_open = spec.minimum is None or spec.maximum is None
    return _is_integer(spec) and is_open and not counts_positions(spec)


def _within(spec: TensorSpec, value: int) -> int:
    """The value next to ``value`` in the range of ``spec`` and of its datatype."""
    limits = np.iinfo(NUMPY_DTYPES[spec.datatype])
    low = int(limits.min if spec.minimum is None else spec.minimum)
    high = int(limits.max if spec.maximum is None else spec.maximum)
    return min(max(value, low), high)


class _Trial:
    """Runs a model on one batch of two; integers default to 0, or to 1 where 0 is padding."""

    def __init__(
        self,
        signature: ModelSignature,
        reference: Reference,
        masks: Sequence[AttentionMask],
        reasons: list[Exception],
    ) -> None:
        self._signature = signature
        self._batch = min(BATCH, signature.max_batch_size)
        self._masks = masks
        self._reference = reference
        self._reasons = reasons
        self._fills = {s.name: Fill.MINIMUM for s in signature.inputs if _is_integer(s)}

    def runs(self, sizes: Sizes, values: Mapping[str, int] | None = None) -> bool:
        """Whether every output has its declared shape and finite values."""
        if values is None and self._fills:
            plain = (x for x in self._signature.inputs if not counts_positions(x))
            ones = {x.name: _within(x, 1) for x in plain if x.name in self._fills}
            return self._runs(sizes, {}) or self._runs(sizes, ones)
        return self._runs(sizes, values or {})

    def _runs(self, sizes: Sizes, values: Mapping[str, int]) -> bool:
        rng = np.random.default_rng(0)
        inputs = draw(self._signature, self._batch, sizes, rng, self._fills, self._masks)
        for name, value in values.items():
            inputs[name] = np.full_like(inputs[name], value)
        try:
            outputs = self._reference(inputs)
        except Exception as error:
            self._reasons.append(error)
            return False
        for spec in self._signature.outputs:
            problem = self._problem(spec, sizes, outputs[spec.name])
            if problem:
                self._reasons.append(ValueError(f"output '{spec.name}' {problem}"))
                return False
        return True

    def lacked_memory(self) -> bool:
        """Whether the last run that failed took too much memory."""
        reason = self._reasons[-1]
        return isinstance(reason, MemoryError) or "alloc" in str(reason)

    def _problem(self, spec: TensorSpec, sizes: Sizes, output: Array) -> str:
        """The problem of an output: a convolution may accept an image smaller than its kernel."""
        batch = (self._batch,) if self._batch else ()
        dims = (*batch, *(sizes.get(d, -1) if isinstance(d, str) else d for d in model_dims(spec)))
        fits = len(dims) == output.ndim and all(
            dim in (-1, size) for dim, size in zip(dims, output.shape, strict=True)
        )
        if not fits:
            return f"has shape {list(output.shape)}, not {list(dims)}"
        numbers = output.size and (output.dtype.kind != "f" or np.isfinite(output).all())
        return "" if numbers else "is empty or not finite"


def _is_integer(spec: TensorSpec) -> bool:
    return spec.datatype != Datatype.BF16 and NUMPY_DTYPES[spec.datatype].kind in "iu"


def _own_axis(name: str, place: int) -> str:
    return f"{name}_{place}"


def _axis_by_place(name: str, place: int) -> str:
    return f"axis_{place}"


def _one_axis(name: str, place: int) -> str:
    return "axis"


def _named(signature: ModelSignature, axis_of: Callable[[str, int], str]) -> ModelSignature:
    def name(spec: TensorSpec) -> TensorSpec:
        dims = (axis_of(spec.name, i) if dim == -1 else dim for i, dim in enumerate(spec.dims))
        return replace(spec, dims=tuple(dims))

    return replace(signature, inputs=tuple(name(spec) for spec in signature.inputs))


def _candidates(names: list[str], shared: bool) -> Iterator[dict[str, int]]:
    """Different sizes for different axes, never 1, which broadcasting would accept anywhere."""
    for size in LADDER if names else (0,):
        yield {name: size * (i + 1) for i, name in enumerate(names)}
    if names:
        for size in (*LADDER, 1) if shared or len(names) == 1 else LADDER:
            yield {name: size + i for i, name in enumerate(names)}


def _axis(name: str, sizes: Sizes, trial: _Trial) -> Axis:
    """The interval around a working size, up to the largest size in a proof."""

    def works(size: int) -> bool:
        return trial.runs({**sizes, name: size})

    longest = max(sizes[name], 1 + DEFAULT_LONGEST)
    minimum = 1 if works(1) else edge(1, sizes[name], works)
    maximum = None if works(longest) else edge(longest, sizes[name], works)
    return Axis(name, minimum, maximum)


def _ranged(
    spec: TensorSpec, sizes: Sizes, trial: _Trial, start: Mapping[str, int] | None, only: bool
) -> TensorSpec:
    """``spec`` with a range; ``start`` None: the values that a proof takes by default."""
    if start is None:
        low = _within(spec, 0)
        return replace(spec, minimum=low, maximum=_within(spec, low + DEFAULT_LARGEST))
    limits = np.iinfo(NUMPY_DTYPES[spec.datatype])
    lowest = int(limits.min) if only or not limits.min else int(limits.min) + 1

    def works(value: int) -> bool:
        return trial.runs(sizes, {**start, spec.name: value})

    with more_memory(MOST_MEMORY):
        ends = [
            int(declared)
            if isinstance(declared, int | float)
            else _reached(start[spec.name], end, works, trial)
            for declared, end in ((spec.minimum, lowest), (spec.maximum, int(limits.max)))
        ]
    return replace(spec, minimum=ends[0], maximum=ends[1])


def _reached(start: int, end: int, works: Callable[[int], bool], trial: _Trial) -> int:
    """The last working number on the way from ``start``, which works, to ``end``.

    It is one of ``STEPS`` where a larger one costs too much, on whatever machine.
    """
    working, sign = start, 1 if end >= start else -1
    if end < 0 < start and not works(0):  # a divisor
        return edge(0, start, works)
    for step in (*STEPS, abs(end - start)):
        value = start + sign * min(step, abs(end - start))
        began = time.process_time()
        runs = works(value)
        if time.process_time() - began > MOST_SECONDS or (not runs and trial.lacked_memory()):
            return working
        if not runs:
            return edge(value, working, works)
        working = value
    return working


def edge(fails: int, working: int, works: Callable[[int], bool]) -> int:
    """The last working number on the way to one that fails."""
    while abs(fails - working) > 1:
        middle = (fails + working) // 2
        if works(middle):
            working = middle
        else:
            fails = middle
    return working
