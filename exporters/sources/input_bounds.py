"""Axes and integer ranges of a model's inputs, found by running the model.

TensorFlow marks a dimension as open, without saying which dimensions are equal or how long they may
be; and an input as integer, without the size of its vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from modelport.exporters.loaded_model import Reference
from modelport.exporters.model_spec import AttentionMask
from modelport.exporters.requests.random_inputs import (
    DEFAULT_LONGEST,
    Fill,
    draw,
    model_dims,
    sizes_of,
)
from modelport.exporters.sources.tensor_flags import parse_tensors
from modelport.gateway.cli.errors import UsageError
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import NUMPY_DTYPES, Array, Axis, ModelSignature, TensorSpec

#: Sizes to try until the model runs; common networks shrink images by up to 32.
LADDER = (8, 32, 64, 16, 4, 2)

#: Larger than any vocabulary; a model that accepts this number accepts any.
LARGEST_ID = 1 << 24

BATCH = 2

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
    """Add names and bounds for open dimensions, and ranges for integers, to ``signature``.

    Dimensions at the same place of several inputs are one axis if the model runs only with equal
    sizes. A bound is declared where the model stops running.

    Raises:
        Unsupported: the model runs at none of the sizes tried.
    """
    reasons: list[Exception] = []
    for shared in (False, True):
        named = _named(signature, shared)
        given = {name: sizes_of(axis)[0] for name, axis in signature.axes.items()}
        dims = dict.fromkeys(d for s in named.inputs for d in s.dims if isinstance(d, str))
        names = [name for name in dims if name not in given]
        trial = _Trial(named, reference, masks, reasons)
        tried = ({**given, **sizes} for sizes in _candidates(names, shared))
        sizes = next((sizes for sizes in tried if trial.runs(sizes)), None)
        if sizes is not None:
            axes = {name: _axis(name, sizes, trial) for name in names}
            for name, axis in signature.axes.items():
                _check_longest(axis, sizes, trial, reasons)
                axes[name] = axis
            flags = {mask.input for mask in masks}
            inputs = tuple(
                replace(spec, minimum=0, maximum=1)
                if spec.name in flags
                else _ranged(spec, sizes, trial)
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
    """The last reason, without what TensorFlow puts around it: names of its functions and calls."""
    text = " ".join(str(reasons[-1]).split())
    return text.rpartition("}} ")[2].partition(" [Op:")[0][:200]


class _Trial:
    """Runs a model on one batch of two; integers default to 0, which every model accepts."""

    def __init__(
        self,
        signature: ModelSignature,
        reference: Reference,
        masks: Sequence[AttentionMask],
        reasons: list[Exception],
    ) -> None:
        self._signature = signature
        self._masks = masks
        self._reference = reference
        self._reasons = reasons
        self._fills = {s.name: Fill.MINIMUM for s in signature.inputs if _is_integer(s)}

    def runs(self, sizes: Sizes, values: Mapping[str, int] | None = None) -> bool:
        """Whether every output has its declared shape and finite values."""
        rng = np.random.default_rng(0)
        inputs = draw(self._signature, BATCH, sizes, rng, self._fills, self._masks)
        for name, value in (values or {}).items():
            inputs[name] = np.full_like(inputs[name], value)
        try:
            outputs = self._reference(inputs)
        except Exception as error:
            self._reasons.append(error)
            return False
        for spec in self._signature.outputs:
            problem = self._problem(spec, outputs[spec.name])
            if problem:
                self._reasons.append(ValueError(f"output '{spec.name}' {problem}"))
                return False
        return True

    def _problem(self, spec: TensorSpec, output: Array) -> str:
        """The problem of an output: a convolution may accept an image smaller than its kernel."""
        batch = (BATCH,) if self._signature.max_batch_size else ()
        dims = (*batch, *model_dims(spec))
        fits = len(dims) == output.ndim and all(
            dim in (-1, size) for dim, size in zip(dims, output.shape, strict=True)
        )
        if not fits:
            return f"has shape {list(output.shape)}, not {list(dims)}"
        numbers = output.size and (output.dtype.kind != "f" or np.isfinite(output).all())
        return "" if numbers else "is empty or not finite"


def _is_integer(spec: TensorSpec) -> bool:
    return NUMPY_DTYPES[spec.datatype].kind in "iu"


def _named(signature: ModelSignature, shared: bool) -> ModelSignature:
    def name(spec: TensorSpec) -> TensorSpec:
        owner = "axis" if shared else spec.name
        dims = (f"{owner}_{i}" if dim == -1 else dim for i, dim in enumerate(spec.dims))
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


def _ranged(spec: TensorSpec, sizes: Sizes, trial: _Trial) -> TensorSpec:
    if not _is_integer(spec) or spec.maximum is not None:
        return spec

    def works(value: int) -> bool:
        return trial.runs(sizes, {spec.name: value})

    largest = min(LARGEST_ID, int(np.iinfo(NUMPY_DTYPES[spec.datatype]).max))
    if works(largest):
        return spec
    return replace(spec, minimum=0, maximum=edge(largest, 0, works))


def edge(fails: int, working: int, works: Callable[[int], bool]) -> int:
    """The last working number on the way to one that fails."""
    while abs(fails - working) > 1:
        middle = (fails + working) // 2
        if works(middle):
            working = middle
        else:
            fails = middle
    return working
