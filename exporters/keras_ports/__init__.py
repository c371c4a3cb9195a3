"""Keras 3 versions of registered PyTorch models, and the mapping between their weights.

The mapping works in both directions: exports use PyTorch to Keras, ``convert`` uses both.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelport.gateway.types import Array


@dataclass(frozen=True, slots=True)
class Link:
    """A PyTorch tensor, or an equal part of it, and the Keras variable with the same values.

    Attributes:
        layer: the layer's name in reports, such as ``encoder.layers.1.linear2``.
        torch_key: the key in the state dict.
        keras_path: the variable's path in the Keras model.
        part: (index, count): which of ``count`` equal parts of the first dimension; joint
            projections hold query, key and value in one tensor.
        to_keras, to_torch: conversions of the values' layout; exact inverses.
    """

    layer: str
    torch_key: str
    keras_path: str
    part: tuple[int, int]
    to_keras: Callable[[Array], Array]
    to_torch: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class KerasPort:
    """A PyTorch model implemented in Keras.

    Attributes:
        build: maps ``model_kwargs`` and a Keras dtype (``float32``, ``float16``, ``bfloat16``) to
            an untrained ``keras.Model``, which takes inputs and returns outputs as dicts by name.
        links: maps ``model_kwargs`` to the links of all weights.
        probes: pairs of (PyTorch submodule path, Keras layer name) in the order of computation
            whose outputs must agree; they locate the divergence of two models.
    """

    build: Callable[[Mapping[str, Any], str], Any]
    links: Callable[[Mapping[str, Any]], Sequence[Link]]
    probes: Callable[[Mapping[str, Any]], Sequence[tuple[str, str]]]


def find_port(path: str) -> KerasPort:
    """Import the port at ``module:attribute``, and with it Keras."""
    module, _, attribute = path.partition(":")
    found: KerasPort = getattr(importlib.import_module(module), attribute)
    return found
