"""The source and target files of a conversion, and their loading into freshly built models."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from modelport.exporters.keras_conversion import keras_weights, weight_comparison
from modelport.exporters.keras_conversion.convert_request import framework_of
from modelport.exporters.keras_conversion.keras_weights import KerasWeights
from modelport.exporters.keras_conversion.report import End
from modelport.exporters.keras_ports import KerasPort, Link
from modelport.exporters.loaded_model import Framework
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.sources import checkpoint
from modelport.exporters.sources.checkpoint import Checkpoint
from modelport.gateway.errors import IntegrityError, UsageError
from modelport.gateway.types import Array


@dataclass(frozen=True, slots=True)
class Pair:
    """The same architecture in both frameworks, built from our own code."""

    spec: ModelSpec
    module: nn.Module
    keras_model: Any
    links: Sequence[Link]
    probes: Sequence[tuple[str, str]]
    model_kwargs: Mapping[str, Any]


class Side(ABC):
    """A file that was read but not yet loaded into a model."""

    end: End
    model_kwargs: Mapping[str, Any]

    @abstractmethod
    def torch_shapes(self, port: KerasPort) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the state dict, for inferring hyper-parameters."""

    @abstractmethod
    def parts(self, pair: Pair) -> dict[str, Array]:
        """Values by Keras path, in PyTorch's layout."""

    @abstractmethod
    def load(self, pair: Pair) -> None:
        """Load the values, all of them and no others, into the model of this framework.

        Raises:
            UsageError: the values do not fit.
            IntegrityError: a value is NaN.
        """

    def misfit(self, pair: Pair) -> str:
        """A statement of the file that contradicts the models; empty if there is none."""
        for name, value in self.model_kwargs.items():
            known = pair.model_kwargs.get(name, value)
            if not _equal(value, known):
                return f"hyper-parameter '{name}' is {value!r}, not {known!r}"
        return ""


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)


class TorchSide(Side):
    """A PyTorch checkpoint."""

    def __init__(self, read: Checkpoint) -> None:
        self._read = read
        self.end = End(read.filename, Framework.PYTORCH, read.sha256)
        self.model_kwargs = read.model_kwargs

    def torch_shapes(self, port: KerasPort) -> Mapping[str, tuple[int, ...]]:
        return self._read.shapes

    def parts(self, pair: Pair) -> dict[str, Array]:
        state = {key: value.float().numpy() for key, value in self._read.state.items()}
        return weight_comparison.torch_parts(state, pair.links)

    def load(self, pair: Pair) -> None:
        checkpoint.load_into(pair.module, self._read)


class KerasSide(Side):
    """A Keras file."""

    def __init__(self, read: KerasWeights) -> None:
        self._read = read
        self.end = End(read.filename, Framework.TENSORFLOW, read.sha256)
        self.model_kwargs = read.model_kwargs

    def torch_shapes(self, port: KerasPort) -> Mapping[str, tuple[int, ...]]:
        return keras_weights.torch_shapes(self._read, port)

    def parts(self, pair: Pair) -> dict[str, Array]:
        return weight_comparison.keras_parts(
            keras_weights.by_path(self._read, pair.keras_model), pair.links
        )

    def misfit(self, pair: Pair) -> str:
        difference = keras_weights.difference(self._read, pair.keras_model)
        return super().misfit(pair) or difference or ""

    def load(self, pair: Pair) -> None:
        where = f"'{self.end.file}' does not fit the model"
        values = keras_weights.by_path(self._read, pair.keras_model)
        expected = {variable.path: tuple(variable.shape) for variable in pair.keras_model.variables}
        problems = [f"'{path}' is missing" for path in expected if path not in values]
        problems += [f"'{path}' is not in the model" for path in values if path not in expected]
        problems += [
            f"'{path}' is {list(values[path].shape)}, but the model expects {list(shape)}"
            for path, shape in expected.items()
            if path in values and values[path].shape != shape
        ]
        if problems:
            more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise UsageError(f"{where}: {problems[0]}{more}; check --model and --model-kwargs")
        difference = keras_weights.difference(self._read, pair.keras_model)
        if difference:
            raise UsageError(
                f"{where}: {difference}; give a model of the Keras port's architecture"
            )
        for path, value in values.items():
            if np.isnan(value).any():
                raise IntegrityError(
                    f"'{self.end.file}': '{path}' contains NaN; use an earlier one"
                )
        keras_weights.fill(pair.keras_model, values)


def open_side(path: Path, model: str) -> Side:
    """Read the file at ``path``; errors as in the two readers."""
    if framework_of(path) is Framework.TENSORFLOW:
        return KerasSide(keras_weights.read(path, model))
    return TorchSide(checkpoint.read(path))
