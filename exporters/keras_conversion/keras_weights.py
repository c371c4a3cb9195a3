"""Weights and metadata of a Keras port in a ``.keras`` or ``.weights.h5`` file.

No code of the file runs: the model is built from our own code and filled with the file's numbers.
The architecture stored in a ``.keras`` file is only compared with the port's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np

from modelport.exporters.keras_ports import KerasPort, Link
from modelport.exporters.sources import keras_guard
from modelport.gateway.errors import IntegrityError, UsageError
from modelport.gateway.repository.manifest import sha256_of
from modelport.gateway.types import Array

#: Module of Keras' operations, such as additions; all other classes are layers.
OPERATIONS = "keras.src.ops."

#: Attribute of a weights file's root; ``.safetensors`` files have it in their metadata.
MODEL_KWARGS_KEY = "model_kwargs"

LAYERS = "layers/"
OPTIMIZER = "optimizer/"

#: Hyper-parameters that leave no trace in a shape, and the layer setting that states each.
STATED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "fraud": {"nhead": ("Attention", "num_heads")},
    "vit": {
        "num_heads": ("Attention", "num_heads"),
        "layer_norm_eps": ("LayerNormalization", "epsilon"),
    },
}

#: Layer settings about training, or about how the file was written.
INCIDENTAL = ("name", "trainable", "dtype", "seed", "quantization_config")
INCIDENTAL_SUFFIXES = ("_initializer", "_regularizer", "_constraint")


@dataclass(frozen=True, slots=True)
class KerasWeights:
    """The content of a file.

    Attributes:
        values: by layer name, in the order of the layer's variables; float32.
        model_kwargs: the hyper-parameters stated in the file.
        layers: the configuration's layers; None for a file with weights only.
    """

    filename: str
    sha256: str
    values: Mapping[str, Sequence[Array]]
    model_kwargs: Mapping[str, Any]
    layers: Sequence[Mapping[str, Any]] | None


def read(path: Path, model: str) -> KerasWeights:
    """Read the weights at ``path``, of the port of ``model``.

    Raises:
        UsageError: the file is of an older kind, or not of a port.
        IntegrityError: the file is damaged, wants to run code, or holds values other than numbers.
    """
    config = keras_guard.read_config(path) if path.suffix.lower() == ".keras" else None
    with keras_guard.open_weights(path) as file:
        if "model_config" in file.attrs or "layer_names" in file.attrs:
            raise keras_guard.hdf5_refusal(path)
        values = _values(path, file)
        kwargs = _kwargs(path, file)
    layers = None
    if config is not None:
        layers = _layers(path, config)
        kwargs |= _stated(layers, STATED.get(model, {}))
    return KerasWeights(path.name, sha256_of(path), values, kwargs, layers)


def _values(path: Path, file: h5py.File) -> dict[str, list[Array]]:
    found: dict[str, dict[int, Array]] = {}
    for where, dataset in keras_guard.check_weights(path, file).items():
        if where.startswith(OPTIMIZER):
            continue
        group, _, index = where.rpartition("/")
        name = file[group].attrs.get("name") if group else None
        if not where.startswith(LAYERS) or not isinstance(name, str) or not index.isdecimal():
            raise UsageError(
                f"'{path.name}' holds '{where}', which no layer of a Keras port has; give a file "
                "that modelport convert wrote, or Keras from such a model"
            )
        values = found.setdefault(name, {})
        if int(index) in values:
            raise UsageError(
                f"'{path.name}' has two layers '{name}'; names are unique in a Keras port"
            )
        values[int(index)] = _array(path, where, dataset)
    if not found:
        raise UsageError(f"'{path.name}' holds no weights of layers; give a whole model's")
    gaps = [name for name, values in found.items() if sorted(values) != list(range(len(values)))]
    if gaps:
        raise UsageError(f"'{path.name}': layer '{gaps[0]}' lacks a variable; save it again")
    return {name: [values[i] for i in range(len(values))] for name, values in found.items()}


def _array(path: Path, where: str, dataset: h5py.Dataset) -> Array:
    value = np.asarray(dataset)
    if dataset.attrs.get("dtype") == "bfloat16" and value.dtype.itemsize == 2:
        value = value.view(ml_dtypes.bfloat16)
    elif value.dtype.kind != "f":
        raise IntegrityError(f"'{path.name}': '{where}' is {value.dtype}, not floating point")
    return value.astype(np.float32)


def _kwargs(path: Path, file: h5py.File) -> dict[str, Any]:
    text = file.attrs.get(MODEL_KWARGS_KEY, "{}")
    try:
        kwargs = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        kwargs = None
    if not isinstance(kwargs, dict):
        raise IntegrityError(f"'{path.name}': attribute '{MODEL_KWARGS_KEY}' is not a JSON object")
    return kwargs


def _layers(path: Path, config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = config.get("config")
    layers = inner.get("layers") if isinstance(inner, dict) else None
    whole = isinstance(layers, list) and all(
        isinstance(layer, dict) and isinstance(layer.get("config"), dict) for layer in layers
    )
    if not whole:
        raise UsageError(f"'{path.name}' is not a functional Keras model; Keras ports are")
    assert isinstance(layers, list)
    return layers


def _stated(
    layers: Sequence[Mapping[str, Any]], stated: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    found = {}
    for name, (kind, key) in stated.items():
        values = (layer["config"].get(key) for layer in layers if layer.get("class_name") == kind)
        value = next(values, None)
        if value is not None:
            found[name] = value
    return found


def torch_shapes(weights: KerasWeights, port: KerasPort) -> dict[str, tuple[int, ...]]:
    """The shapes that the state dict would have; empty if no depth of the port fits."""
    for depth in range(1, len(weights.values) + 1):
        links = _by_layer(port.links(_Depth(depth)))
        if set(links) == set(weights.values):
            break
    else:
        return {}
    shapes = {}
    for name, values in weights.values.items():
        for link, value in zip(links[name], values, strict=False):
            try:
                rows, *rest = link.to_torch(value).shape
            except ValueError:  # another number of dimensions; the strict comparison reports it
                continue
            shapes[link.torch_key] = (rows * link.part[1], *rest)
    return shapes


class _Depth(dict[str, Any]):
    """Hyper-parameters with the depth as their only known value: a port's links take no other."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth = depth

    def __missing__(self, key: str) -> int:
        return self._depth


def _by_layer(links: Sequence[Link]) -> dict[str, list[Link]]:
    found: dict[str, list[Link]] = {}
    for link in links:
        found.setdefault(link.keras_path.rpartition("/")[0], []).append(link)
    return found


def by_path(weights: KerasWeights, model: Any) -> dict[str, Array]:
    """The file's values by the model's paths, or by their position if it has no such path."""
    paths = {layer.name: [v.path for v in layer.variables] for layer in model.layers}
    return {
        paths[name][i] if i < len(paths.get(name, ())) else f"{name}/{i}": value
        for name, values in weights.values.items()
        for i, value in enumerate(values)
    }


def fill(model: Any, values: Mapping[str, Array]) -> None:
    """Set the model's variables to ``values``; both have the same paths and shapes."""
    for variable in model.variables:
        variable.assign(values[variable.path])


def difference(weights: KerasWeights, model: Any) -> str | None:
    """The first difference between the architecture in a ``.keras`` file and the port's, or None.

    Initialisers and other settings of training are ignored.
    """
    if weights.layers is None:
        return None
    meant = _canonical(json.loads(json.dumps(model.get_config()["layers"], default=str)))
    try:
        found = _canonical(weights.layers)
    except (KeyError, TypeError, ValueError, RecursionError):
        return "its configuration has another form"
    for theirs, ours in zip(found, meant, strict=False):
        for key in sorted(ours.keys() & theirs.keys()):
            if not _equal(theirs[key], ours[key]):
                place = f"layer '{ours['name']}'" if ours["name"] else f"operation {ours['class']}"
                return f"{place}: its {key} is {_short(theirs[key])}, not {_short(ours[key])}"
    if len(found) != len(meant):
        return f"it has {len(found)} layers and operations, not {len(meant)}"
    return None


def _canonical(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Settings, inputs and names of layers; operations, named by Keras' counters, get no name."""
    places = {layer.get("name"): i for i, layer in enumerate(layers)}
    canonical = []
    for layer in layers:
        settings = {
            key: value
            for key, value in layer["config"].items()
            if key not in INCIDENTAL and not key.endswith(INCIDENTAL_SUFFIXES)
        }
        counted = str(layer.get("module")).startswith(OPERATIONS)
        canonical.append(
            {
                **_plain(settings, places),
                "class": layer.get("class_name"),
                "inputs": _plain(layer.get("inbound_nodes"), places),
                "name": None if counted else layer.get("name"),
            }
        )
    return canonical


def _plain(value: Any, places: Mapping[Any, int]) -> Any:
    """``value`` with layers replaced by their positions."""
    if isinstance(value, dict):
        if value.get("class_name") == "__keras_tensor__":
            name, *rest = value["config"]["keras_history"]
            return {"from": places.get(name), "output": rest}
        return {k: _plain(v, places) for k, v in value.items() if k != "shared_object_id"}
    if isinstance(value, list | tuple):
        return [_plain(item, places) for item in value]
    return value


def _equal(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, float) and isinstance(ours, float):
        return math.isclose(theirs, ours, rel_tol=1e-9)
    return bool(theirs == ours)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
