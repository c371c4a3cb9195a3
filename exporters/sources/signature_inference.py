"""Inference of a signature for an ``nn.Module`` without one.

Inputs come from the first of these:

1. ``--input NAME:DATATYPE[DIMS]``, see ``modelport.exporters.sources.tensor_flags``;
2. example inputs on the module: ``example_inputs``, ``example_input_array`` (Lightning) or
   ``dummy_inputs`` (Hugging Face); their first dimension is the batch;
3. the first layer with weights, if ``forward`` takes one tensor.

Outputs come from running the module at several sizes; a dimension that follows an axis gets its
name.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelport.exporters.model_spec import AttentionMask, ModelSpec
from modelport.exporters.requests import attention_masks
from modelport.exporters.requests.random_inputs import (
    WITHIN,
    Fill,
    counts_positions,
    draw,
    sizes_of,
)
from modelport.exporters.sources import SourceRequest, input_bounds
from modelport.exporters.sources.tensor_flags import (
    DEFAULT_LONGEST,
    lengths_chosen,
    parse_tensors,
)
from modelport.exporters.sources.torch_eager import (
    call,
    datatype_of,
    inference_mode,
    keywords_of,
    named_tensors,
)
from modelport.gateway.errors import Unsupported, UsageError, first_line
from modelport.gateway.types import Array, Axis, Datatype, ModelSignature, TensorSpec

EXAMPLE_ATTRIBUTES = ("example_inputs", "example_input_array", "dummy_inputs")

#: Smallest image that common convolutional networks accept.
SMALLEST_IMAGE = 32

Declared = tuple[list[TensorSpec], dict[str, Axis]]


def spec(module: nn.Module, request: SourceRequest, declared: ModelSpec | None) -> ModelSpec:
    """``declared``, or the defaults, with an inferred signature.

    Raises:
        UsageError: the inputs cannot be inferred, or the module does not run on them.
    """
    inputs, axes = _inputs(module, request)
    masks = attention_masks.parse(request.masks) or attention_masks.infer(inputs)
    inputs = [_bounded(spec, masks) for spec in inputs]
    if any(-1 in spec.dims for spec in inputs):
        taken = ModelSignature(tuple(inputs), (), request.max_batch_size, axes)
        settled = input_bounds.settle(taken, partial(_answers, module), masks)
        inputs, axes = list(settled.inputs), dict(settled.axes)

    def signature(module: Any, max_batch_size: int) -> ModelSignature:
        taken = ModelSignature(tuple(inputs), (), max_batch_size, axes)
        outputs = _outputs(module, taken, masks, request)
        return ModelSignature(tuple(inputs), outputs, max_batch_size, axes)

    if declared is not None:
        return replace(declared, signature=signature, masks=masks)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(module).__name__).lower()
    return ModelSpec(name=name, signature=signature, masks=masks)


def _bounded(spec: TensorSpec, masks: Sequence[AttentionMask]) -> TensorSpec:
    """``spec`` with the range of a mask, if it is one that declares none."""
    is_mask = any(mask.input == spec.name for mask in masks)
    if not is_mask or counts_positions(spec) or spec.datatype is Datatype.BOOL:
        return spec
    return replace(spec, minimum=0, maximum=1)


def _inputs(module: nn.Module, request: SourceRequest) -> Declared:
    if request.inputs:
        inputs, _, axes = parse_tensors(request.inputs)
        for spec in inputs:
            if spec.datatype is Datatype.BYTES:
                raise Unsupported(
                    f"input '{spec.name}' has datatype BYTES, which cannot be exported: PyTorch "
                    "has no texts; take their tokens as INT64"
                )
        return inputs, axes
    for attribute in EXAMPLE_ATTRIBUTES:
        try:
            example: Any = getattr(module, attribute, None)
        except Exception:  # a property may fail
            continue
        if isinstance(example, Tensor):
            example = (example,)
        if isinstance(example, Mapping | Sequence) and len(example):
            return _from_example(module, example, attribute)
    return _from_first_layer(module, request)


def _arguments(module: nn.Module) -> list[inspect.Parameter]:
    """The required arguments of ``forward``."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]


def _from_example(module: nn.Module, example: Any, attribute: str) -> Declared:
    names = list(inspect.signature(module.forward).parameters)
    pairs = example.items() if isinstance(example, Mapping) else zip(names, example, strict=False)
    specs = []
    for name, value in pairs:
        if not isinstance(value, Tensor) or value.dim() == 0 or not value.numel():
            raise UsageError(f"'{attribute}' of the model holds no batch for '{name}'; add --input")
        dims = tuple(value.shape[1:])
        datatype = datatype_of(name, value)
        if dims and not value.is_floating_point():
            specs.append(TensorSpec(name, datatype, dims, 0, _largest_id(module, name, value)))
        elif dims:
            specs.append(TensorSpec(name, datatype, dims))
        else:
            specs.append(TensorSpec(name, datatype, (1,), reshape=()))
    specs.sort(key=lambda spec: names.index(spec.name) if spec.name in names else len(names))
    return specs, {}


def _largest_id(module: nn.Module, name: str, example: Tensor) -> int:
    """The largest id of the first embedding that the example fits, or the example's own."""
    largest = int(example.long().max())  # not every integer has a maximum of its own
    if largest <= 1 and attention_masks.has_mask_name(name):
        return 1
    tables = (m.num_embeddings - 1 for m in module.modules() if isinstance(m, nn.Embedding))
    return next((table for table in tables if table >= largest), largest)


def _from_first_layer(module: nn.Module, request: SourceRequest) -> Declared:
    arguments = _arguments(module)
    first = next((m for m in module.modules() if m._parameters and not list(m.children())), None)
    if len(arguments) == 1 and first is not None:
        name = arguments[0].name
        longest = DEFAULT_LONGEST
        if isinstance(first, nn.Linear):
            return [TensorSpec(name, Datatype.FP32, (first.in_features,))], {}
        if isinstance(first, nn.Embedding):
            tokens = TensorSpec(name, Datatype.INT64, ("sequence",), 0, first.num_embeddings - 1)
            return [tokens], {"sequence": Axis("sequence", 1, longest)}
        if isinstance(first, nn.Conv1d):
            series = TensorSpec(name, Datatype.FP32, (first.in_channels, "length"))
            return [series], {"length": Axis("length", SMALLEST_IMAGE, longest)}
        if isinstance(first, nn.Conv2d):
            image = TensorSpec(name, Datatype.FP32, (first.in_channels, "height", "width"))
            sides = {n: Axis(n, SMALLEST_IMAGE, longest) for n in ("height", "width")}
            return [image], sides
    taken = ", ".join(argument.name for argument in arguments)
    raise UsageError(
        f"--model '{request.model}' declares no signature and its inputs ({taken or 'none'}) "
        f"cannot be inferred from its layers; declare each, such as --input "
        f"'{arguments[0].name if arguments else 'x'}:FP32[3,224,224]', or set 'modelport_spec'"
    )


def _outputs(
    module: nn.Module,
    taken: ModelSignature,
    masks: Sequence[AttentionMask],
    request: SourceRequest,
) -> tuple[TensorSpec, ...]:
    """The module's outputs, with dimensions named after the axes that they follow."""
    base = {name: sizes_of(axis)[0] for name, axis in taken.axes.items()}
    batch = 2 if taken.max_batch_size else 0
    names = request.output_names
    first = _run(module, taken, masks, batch, base, request)
    varied = {}
    for name, axis in taken.axes.items():
        other = {**base, name: sizes_of(axis)[-1]}
        varied[name] = _run(module, taken, masks, batch, other, request) if other != base else first
    filled = _at_edges(module, taken, masks, batch, base, request)
    specs = []
    for name, key in _named(names, list(first)).items():
        value, datatype = first[key], datatype_of(name, first[key])
        if not name or not name.isprintable():
            raise UsageError(
                f"the model names an output {name!r}; name its outputs by --output-name"
            )
        dims: list[int | str] = list(value.shape[1:] if batch else value.shape)
        if batch and (not value.dim() or value.shape[0] != batch):
            raise UsageError(
                f"output '{name}' has shape {list(value.shape)} for a batch of {batch}: its first "
                "dimension is not the batch; choose other outputs with --output-name, or export "
                "without batches: --max-batch-size 0, whole shapes in --input"
            )
        for axis_name, values in varied.items():
            longest = _of_same_rank(name, value, values.get(key), axis_name)
            for position, size in enumerate(longest.shape[1 if batch else 0 :]):
                if dims[position] != size and not isinstance(dims[position], str):
                    follows = size == sizes_of(taken.axes[axis_name])[-1]
                    same = dims[position] == base[axis_name]
                    dims[position] = axis_name if follows and same else -1
        for found in (values[key] for values in filled if key in values):
            if found.dim() == value.dim():
                sizes = zip(value.shape, found.shape, strict=True)
                changes = [a != b for a, b in sizes][1 if batch else 0 :]
                dims = [-1 if changed else d for d, changed in zip(dims, changes, strict=True)]
        if 0 in dims:
            raise UsageError(
                f"output '{name}' is empty, {list(value.shape)} for a batch of {batch}; choose "
                "other outputs with --output-name, or larger inputs with --input"
            )
        reshape = None if dims else ()
        specs.append(TensorSpec(name, datatype, tuple(dims or [1]), reshape=reshape))
    return tuple(specs)


def _at_edges(
    module: nn.Module,
    taken: ModelSignature,
    masks: Sequence[AttentionMask],
    batch: int,
    sizes: Mapping[str, int],
    request: SourceRequest,
) -> list[dict[str, Tensor]]:
    """The module's outputs for edge inputs; the lengths of some outputs depend on the values."""
    found = []
    for fill in WITHIN:
        with contextlib.suppress(UsageError):  # the proof says so
            found.append(_run(module, taken, masks, batch, sizes, request, fill))
    return found


def _of_same_rank(name: str, shortest: Tensor, longest: Tensor | None, axis: str) -> Tensor:
    """``longest``, which the model gives at the longest ``axis``, if it has the dims of
    ``shortest``."""
    if longest is None or longest.dim() != shortest.dim():
        ends = list(shortest.shape), "absent" if longest is None else list(longest.shape)
        raise UsageError(
            f"output '{name}' is {ends[0]} at the shortest '{axis}' and {ends[1]} at the longest; "
            f"choose other outputs with --output-name, or one size of '{axis}' with --input"
        )
    return longest


def _named(wanted: Sequence[str], found: Sequence[str]) -> dict[str, str]:
    """The model's own names of the outputs by the names to publish: ``wanted`` chooses from the
    model's own names, or renames all outputs."""
    if not wanted:
        return {name: name for name in found}
    if wrong := [name for name in wanted if not name or wanted.count(name) > 1]:
        raise UsageError(
            f"--output-name '{wrong[0]}' is empty or given twice; name each output once"
        )
    if set(wanted) <= set(found):
        return {name: name for name in wanted}
    if len(wanted) != len(found):
        raise UsageError(
            f"--output-name is given {len(wanted)} times, the model has {len(found)} outputs: "
            f"{', '.join(found)}; name some of these, or give every one a name"
        )
    return dict(zip(wanted, found, strict=True))


def _run(
    module: nn.Module,
    taken: ModelSignature,
    masks: Sequence[AttentionMask],
    batch: int,
    sizes: Mapping[str, int],
    request: SourceRequest,
    fill: Fill = Fill.RANDOM,
) -> dict[str, Tensor]:
    fills = dict.fromkeys((spec.name for spec in taken.inputs), fill)
    inputs = draw(taken, batch, sizes, np.random.default_rng(0), fills, masks)
    shapes = ", ".join(f"{spec.name} {list(inputs[spec.name].shape)}" for spec in taken.inputs)
    try:
        result = _answers(module, {spec.name: inputs[spec.name] for spec in taken.inputs})
    except Exception as error:
        reason = first_line(error)
        row = {spec.name: inputs[spec.name][:1] for spec in taken.inputs}
        remedy = (
            _one_row(taken, row)
            if batch > 1 and _runs(module, row)
            else _remedy(module, taken, request.inputs, error)
        )
        raise UsageError(f"the model does not run on {shapes}: {reason}; {remedy}") from error
    return named_tensors(result, request.output_names)


def _runs(module: nn.Module, inputs: Mapping[str, Array]) -> bool:
    try:
        _answers(module, inputs)
    except Exception:
        return False
    return True


def _one_row(taken: ModelSignature, row: Mapping[str, Array]) -> str:
    """The remedy for a module that runs on one row and not on several."""
    shapes = " ".join(
        f"--input '{spec.name}:{spec.datatype.value}{list(row[spec.name].shape)}'".replace(
            ", ", ","
        )
        for spec in taken.inputs
    )
    return f"it runs on one row alone, so give the whole shape: --max-batch-size 0 {shapes}"


def _answers(module: nn.Module, inputs: Mapping[str, Array]) -> Any:
    with inference_mode(module):
        tensors = [torch.from_numpy(value) for value in inputs.values()]
        return call(module, tensors, keywords_of(module, list(inputs)))


def _remedy(
    module: nn.Module, taken: ModelSignature, declared: Sequence[str], error: Exception
) -> str:
    """The remedy for a module that fails on inputs of ``taken``, ``declared`` or guessed."""
    arguments = _arguments(module)
    alone = len(arguments) == 1 and arguments[0].name not in {spec.name for spec in taken.inputs}
    if declared and alone and not isinstance(error, RuntimeError):  # torch's own, about sizes
        return (
            f"if '{arguments[0].name}', the only argument of forward(), is a dict or a list, let "
            "--model name a factory whose module takes each tensor as an argument"
        )
    if len(arguments) > len(taken.inputs):
        names = ", ".join(argument.name for argument in arguments)
        return f"declare each with --input: {names}"
    if chosen := lengths_chosen(taken, declared):
        return chosen
    if declared:
        return "declare what forward() accepts with --input"
    return "declare each input with --input, or all with 'modelport_spec' on the factory"
