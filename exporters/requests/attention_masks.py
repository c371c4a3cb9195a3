"""Attention masks: their declaration on the command line, and the values that they leave defined.

``--mask NAME[:PADDING][=OUTPUT,...]``, such as ``attention_mask:left=logits``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from modelport.exporters.model_spec import AttentionMask
from modelport.exporters.requests.random_inputs import counts_positions, model_dims
from modelport.gateway.errors import UsageError, suggestion
from modelport.gateway.types import NUMPY_DTYPES, Array, ModelSignature, TensorSpec

PADDINGS = ("right", "left", "any")

_FLAG = re.compile(r"(?P<input>[^:=,]+)(?::(?P<padding>\w+))?(?:=(?P<outputs>.+))?")
#: Inputs of these names are masks; those of torch's ``key_padding_mask`` mean the opposite.
_MASK_NAME = re.compile(r"mask|(\w+_)?(attention|input|pixel)_mask")


def parse(flags: Sequence[str]) -> tuple[AttentionMask, ...]:
    """Parse the values of ``--mask``; raise ``UsageError`` if one has another form."""
    masks = [_parse(flag) for flag in flags]
    names = [mask.input for mask in masks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--mask declares '{twice[0]}' twice; declare each mask once")
    return tuple(masks)


def _parse(flag: str) -> AttentionMask:
    match = _FLAG.fullmatch(flag.strip())
    if match is None or match["padding"] not in (None, *PADDINGS):
        raise UsageError(
            f"--mask '{flag}' is not understood; write NAME, NAME:right, NAME:left or NAME:any, "
            "and after '=' the outputs that it leaves undefined: 'attention_mask:left=logits'"
        )
    outputs = [name.strip() for name in (match["outputs"] or "").split(",")]
    return AttentionMask(
        match["input"].strip(), match["padding"] or "right", tuple(filter(None, outputs))
    )


def infer(inputs: Sequence[TensorSpec]) -> tuple[AttentionMask, ...]:
    """The inputs that are masks by their names, datatypes and ranges, padded on the right."""
    return tuple(AttentionMask(spec.name) for spec in inputs if _is_mask(spec))


def _is_mask(spec: TensorSpec) -> bool:
    kind, bounds = NUMPY_DTYPES[spec.datatype].kind, (spec.minimum, spec.maximum)
    is_flag = kind == "b" or (kind in "iu" and bounds in ((0, 1), (None, None)))
    return is_flag and bool(model_dims(spec)) and has_mask_name(spec.name)


def has_mask_name(name: str) -> bool:
    """Whether an input of this name is commonly a mask."""
    return _MASK_NAME.fullmatch(name) is not None


def check(signature: ModelSignature, masks: Sequence[AttentionMask]) -> None:
    """Raise ``UsageError`` unless ``signature`` has what ``masks`` name."""
    inputs = {spec.name: spec for spec in signature.inputs}
    outputs = {spec.name: spec for spec in signature.outputs}
    for mask in masks:
        spec = inputs.get(mask.input)
        if spec is None:
            raise _unknown(mask, "input", mask.input, inputs)
        if mask.padding not in PADDINGS:
            raise UsageError(
                f"mask '{mask.input}': padding '{mask.padding}' is not one of {', '.join(PADDINGS)}"
            )
        if not counts_positions(spec) and not model_dims(spec):
            raise UsageError(
                f"mask '{mask.input}' has no axis; declare one, or lengths with a range that ends "
                f"at an axis: '{mask.input}:INT64[]=1..sequence'"
            )
        for name in mask.outputs:
            if name not in outputs:
                raise _unknown(mask, "output", name, outputs)
            if _axis(spec) not in model_dims(outputs[name]):
                raise UsageError(
                    f"mask '{mask.input}': output '{name}' has no axis '{_axis(spec)}', so that "
                    "none of its values is undefined; omit it"
                )
            if not counts_positions(spec) and len(model_dims(spec)) > 1:
                raise UsageError(
                    f"mask '{mask.input}' has {len(model_dims(spec))} axes; only a mask of one "
                    "axis can leave outputs undefined"
                )


def _unknown(
    mask: AttentionMask, kind: str, name: str, known: Mapping[str, TensorSpec]
) -> UsageError:
    there = suggestion(name, known) or f"it has {', '.join(known)}"
    return UsageError(f"mask '{mask.input}': the model has no {kind} '{name}'; {there}")


def _axis(spec: TensorSpec) -> int | str:
    """The axis that a mask's positions are on."""
    return spec.maximum if isinstance(spec.maximum, str) else model_dims(spec)[-1]


def defined(
    signature: ModelSignature,
    masks: Sequence[AttentionMask],
    output: TensorSpec,
    inputs: Mapping[str, Array],
    shape: tuple[int, ...],
) -> Array | None:
    """The values of ``output`` that are defined for ``inputs``, as bools of ``shape``.

    Returns:
        None if all are, or if ``shape`` is not the declared one.
    """
    leading = 1 if signature.max_batch_size else 0
    dims = model_dims(output)
    found = None
    for mask in masks:
        if output.name not in mask.outputs or len(shape) != leading + len(dims):
            continue
        spec = next(spec for spec in signature.inputs if spec.name == mask.input)
        place = leading + dims.index(_axis(spec))
        held = _held(mask, spec, inputs[mask.input], shape[place])
        if held.shape != (*shape[:leading], shape[place]):
            continue
        around = [size if i < leading or i == place else 1 for i, size in enumerate(shape)]
        held = np.broadcast_to(held.reshape(around), shape)
        found = held if found is None else found & held
    return found


def _held(mask: AttentionMask, spec: TensorSpec, values: Array, size: int) -> Array:
    """The positions with data, ``[batch, size]``."""
    if not counts_positions(spec):
        return np.asarray(values != 0)
    if mask.padding == "left":
        return np.asarray(np.arange(size) >= size - values[..., None])
    return np.asarray(np.arange(size) < values[..., None])
