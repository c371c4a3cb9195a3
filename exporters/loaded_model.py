"""The loaded model that artifacts are made from and compared with, in any framework."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from modelport.exporters.model_spec import ModelSpec
from modelport.gateway.repository.manifest import sha256_of
from modelport.gateway.types import Array, ModelSignature

#: Maps inputs by name, batch dimension first, to outputs by name.
Reference = Callable[[Mapping[str, Array]], dict[str, Array]]


class Framework(StrEnum):
    """The framework that a model was trained in; it determines the available formats."""

    PYTORCH = "pytorch"
    TENSORFLOW = "tensorflow"
    SCIKIT_LEARN = "scikit-learn"
    XGBOOST = "xgboost"
    LIGHTGBM = "lightgbm"
    CATBOOST = "catboost"
    RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class Origin:
    """A file or folder that was read: its name without the path, and the digest of its content."""

    name: str
    sha256: str


def digest_of(folder: Path, files: Iterable[Path]) -> str:
    """One SHA-256 over the names, relative to ``folder``, and the contents of ``files``."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{sha256_of(file)}  {file.relative_to(folder).as_posix()}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class WeightPrecision:
    """The datatype that most weights are stored in, and the one that the reference computes in."""

    stored: str = "float32"
    computed: str = "float32"


class Diagnostics(Protocol):
    """Runs of a model that tell more than its answers; see ``TorchDiagnostics``."""

    def other_branches(
        self, inputs: Mapping[str, Array], atol: float, rtol: float
    ) -> Iterator[dict[str, Array]]: ...

    def selections(self, inputs: Mapping[str, Array]) -> list[tuple[Array, Array, int]]: ...

    def rounded_otherwise(self) -> Iterator[tuple[str, Callable[[], Reference]]]: ...

    def first_mixing(
        self, inputs: Mapping[str, Array], others: Mapping[str, Array], kept: Array
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Source:
    """A model with its trained weights.

    Attributes:
        model: an ``nn.Module`` in ``eval`` mode, or a callable ``tf.Module`` or ``keras.Model``.
        reference: the model in eager mode; what an artifact must compute.
        compares: whether the model decides by comparisons of floats. Without, TensorFlow's kernels
            drop a NaN by chance, and such an answer is none; None: no kernel does.
        parameter_count: trained values, buffers excluded.
        origins: the files it was read from: the checkpoint, then adapters.
        model_kwargs: the hyper-parameters passed to the factory.
        weights: the precision of the weights.
        diagnostics: variants of the model, for a difference that rounding may have made.
        notices: what the user should know that the artifact lacks.
        labels: class names of the decision's output, if the checkpoint has them.
        found_ranges: the integer inputs whose ranges nobody declared; the signature has the values
            that the model takes.
        companions: contents of files that are published with the artifact, by name, such as a
            tokenizer's.
    """

    framework: Framework
    model: Any
    spec: ModelSpec
    signature: ModelSignature
    reference: Reference
    parameter_count: int
    origins: tuple[Origin, ...]
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    companions: Mapping[str, bytes] = field(default_factory=dict)
    weights: WeightPrecision = WeightPrecision()
    found_ranges: frozenset[str] = frozenset()
    diagnostics: Diagnostics | None = None
    notices: tuple[str, ...] = ()
    compares: Callable[[], bool] | None = None
