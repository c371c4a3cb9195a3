"""Keras 3 models that compute what registered PyTorch models compute, and the map between weights.

One map is used in both directions: PyTorch to Keras for the exports, either way for ``convert``.
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
        layer: what a report calls the place, such as ``encoder.layers.1.linear2``.
        torch_key: the key in the state dict.
        keras_path: the variable's path in the twin.
        part: (index, count): which of ``count`` equal parts of the first dimension; joint
            projections hold query, key and value in one tensor.
        to_keras, to_torch: the values the other way round; exact inverses.
    """

    layer: str
    torch_key: str
    keras_path: str
    part: tuple[int, int]
    to_keras: Callable[[Array], Array]
    to_torch: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Twin:
    """The Keras side of a model.

    Attributes:
        build: from ``model_kwargs`` and a Keras dtype (``float32``, ``float16``, ``bfloat16``) to
            an untrained ``keras.Model``, called with a dict of inputs by name and returning a dict
            of outputs by name.
        links: every weight, from ``model_kwargs``.
        probes: pairs of (PyTorch submodule path, Keras layer name) in order of computation whose
            outputs must agree; they tell where two models part.
    """

    build: Callable[[Mapping[str, Any], str], Any]
    links: Callable[[Mapping[str, Any]], Sequence[Link]]
    probes: Callable[[Mapping[str, Any]], Sequence[tuple[str, str]]]


def find_twin(path: str) -> Twin:
    """The twin at ``module:attribute``; importing it imports Keras."""
    module, _, attribute = path.partition(":")
    twin: Twin = getattr(importlib.import_module(module), attribute)
    return twin
