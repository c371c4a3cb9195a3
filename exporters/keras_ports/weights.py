"""Strict weight mapping between PyTorch and Keras in both directions, and links of common
layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from modelport.exporters.keras_ports import Link
from modelport.gateway.errors import UsageError
from modelport.gateway.types import Array

KEYS_NAMED = 3  # how many offending names a message lists before it only counts

PROJECTIONS = ("query", "key", "value")


def port(state: Mapping[str, Any], model: Any, links: Sequence[Link]) -> None:
    """Fill a Keras model with the values of a state dict, cast to the model's dtype.

    Args:
        state: PyTorch tensors or arrays by key; every key is used.
        model: of the same port as ``links``; every variable is set, once.

    Raises:
        UsageError: a key is missing, left over or of another shape; the message names the layer.
    """
    variables = _variables(model, links)
    joints = _joints(links)
    _check_names("state dict", "key", {key: parts[0].layer for key, parts in joints.items()}, state)
    for key, parts in joints.items():
        value = _array(state[key])
        for link in parts:
            # The shape of the whole tensor that ``variable`` is a part of.
            variable = variables[link.keras_path]
            part = link.to_torch(np.broadcast_to(np.float32(0), tuple(variable.shape)))
            expected = (part.shape[0] * link.part[1], *part.shape[1:])
            if value.shape != expected:
                raise UsageError(
                    f"layer '{link.layer}': '{key}' has shape {list(value.shape)} where the Keras "
                    f"model takes {list(expected)}; correct --model-kwargs"
                )
        pieces = np.split(value, len(parts)) if len(parts) > 1 else [value]
        for link, piece in zip(parts, pieces, strict=True):
            variables[link.keras_path].assign(link.to_keras(piece))


def extract(model: Any, links: Sequence[Link]) -> dict[str, Array]:
    """Rebuild the state dict that a Keras model was filled from, bit by bit.

    Raises:
        UsageError: the model's variables are not those of the map, or the parts of a joint tensor
            do not fit each other; the message names the layer.
    """
    variables = _variables(model, links)
    state = {}
    for key, parts in _joints(links).items():
        pieces = [link.to_torch(variables[link.keras_path].numpy()) for link in parts]
        if len({piece.shape for piece in pieces}) > 1:
            shapes = ", ".join(str(list(piece.shape)) for piece in pieces)
            raise UsageError(
                f"layer '{parts[0].layer}': the parts of '{key}' have shapes {shapes}, which must "
                "be equal; use a model of the Keras port's architecture"
            )
        state[key] = np.ascontiguousarray(np.concatenate(pieces) if len(pieces) > 1 else pieces[0])
    return state


def _variables(model: Any, links: Sequence[Link]) -> dict[str, Any]:
    """The model's variables by path; exactly those that the mapping names."""
    variables = {variable.path: variable for variable in model.variables}
    expected = {link.keras_path: link.layer for link in links}
    if len(expected) != len(links) or len(variables) != len(model.variables):
        raise ValueError("the weight map, or the model, names a variable twice")
    _check_names("Keras model", "variable", expected, variables)
    return variables


def _joints(links: Sequence[Link]) -> dict[str, list[Link]]:
    """The links of each state dict key, with all parts in order."""
    joints: dict[str, list[Link]] = {}
    for link in links:
        joints.setdefault(link.torch_key, []).append(link)
    for key, parts in joints.items():
        parts.sort(key=lambda link: link.part)
        if [link.part for link in parts] != [(i, len(parts)) for i in range(len(parts))]:
            raise ValueError(f"the weight map lacks a part of '{key}'")
    return joints


def _check_names(place: str, noun: str, layers: Mapping[str, str], found: Collection[str]) -> None:
    """Refuse missing or unknown names; ``layers`` maps each expected name to its layer."""
    missing = [name for name in layers if name not in found]
    if missing:
        raise UsageError(
            f"layer '{layers[missing[0]]}': the {place} lacks {_listed(noun, missing)}; "
            "correct --model-kwargs, or give the whole model"
        )
    unknown = [name for name in found if name not in layers]
    if unknown:
        raise UsageError(
            f"the {place} has {_listed(noun, unknown)} that no layer of the Keras port takes; "
            "correct --model-kwargs"
        )


def _listed(noun: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - KEYS_NAMED} more" if len(names) > KEYS_NAMED else ""
    quoted = ", ".join(f"'{name}'" for name in names[:KEYS_NAMED])
    return f"{noun if len(names) == 1 else noun + 's'} {quoted}{more}"


def _array(value: Any) -> Array:
    """The array of a tensor, without a copy; bfloat16, which numpy lacks, becomes float32
    exactly."""
    if isinstance(value, np.ndarray):
        return value
    if str(value.dtype) == "torch.bfloat16":
        value = value.float()
    array: Array = value.detach().cpu().numpy()
    return array


def _same(value: Array) -> Array:
    return value


def _swapped(value: Array) -> Array:
    """Convert PyTorch's ``[out, in]`` to Keras' ``[in, out]``, and back."""
    return value.transpose(1, 0)


def _kernel_last(value: Array) -> Array:
    """Convert ``[out, in, height, width]`` to ``[height, width, in, out]``."""
    return value.transpose(2, 3, 1, 0)


def _kernel_first(value: Array) -> Array:
    return value.transpose(3, 2, 0, 1)


def same(layer: str, torch_key: str, variable: str) -> Link:
    """A tensor that is equal on both sides, in the Keras layer of that name."""
    return Link(layer, torch_key, f"{layer}/{variable}", (0, 1), _same, _same)


def dense(layer: str) -> Iterator[Link]:
    """``nn.Linear`` and ``Dense`` of the same name."""
    yield Link(layer, f"{layer}.weight", f"{layer}/kernel", (0, 1), _swapped, _swapped)
    yield same(layer, f"{layer}.bias", "bias")


def convolution(layer: str) -> Iterator[Link]:
    """``nn.Conv2d`` and ``Conv2D`` of the same name."""
    yield Link(layer, f"{layer}.weight", f"{layer}/kernel", (0, 1), _kernel_last, _kernel_first)
    yield same(layer, f"{layer}.bias", "bias")


def layer_norm(layer: str) -> Iterator[Link]:
    """``nn.LayerNorm`` and ``LayerNormalization`` of the same name."""
    yield same(layer, f"{layer}.weight", "gamma")
    yield same(layer, f"{layer}.bias", "beta")


def joint_projections(layer: str, weight: str, bias: str) -> Iterator[Link]:
    """One ``[3 * width, width]`` projection, and one ``Dense`` each for query, key and value."""
    for i, name in enumerate(PROJECTIONS):
        place, part = f"{layer}.{name}", (i, len(PROJECTIONS))
        yield Link(place, weight, f"{place}/kernel", part, _swapped, _swapped)
        yield Link(place, bias, f"{place}/bias", part, _same, _same)
