"""The request of a conversion between Keras and PyTorch, and the checks that need neither."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelport.exporters import model_registry as registry
from modelport.exporters import model_spec
from modelport.exporters.loaded_model import Framework
from modelport.exporters.sources import PICKLED, SAFETENSORS, keras_guard
from modelport.gateway.errors import AlreadyExists, UsageError

DEFAULT_SAMPLES = 1000
KERAS_SUFFIX = ".keras"
TORCH_SUFFIXES = PICKLED | SAFETENSORS


@dataclass(frozen=True, slots=True)
class ConvertRequest:
    """The options of one conversion; file names determine the frameworks.

    Attributes:
        model: a registered name.
        model_kwargs: hyper-parameters; they override those in the files.
        check: compare the two files, write no model.
    """

    source: Path
    target: Path
    model: str
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    samples: int = DEFAULT_SAMPLES
    seed: int = 0
    check: bool = False

    def check_arguments(self) -> None:
        """Check names and files; this imports neither framework.

        Raises:
            UsageError, AlreadyExists: a file is not what it should be, or the model is unknown.
        """
        frameworks = [framework_of(path) for path in (self.source, self.target)]
        if frameworks[0] is frameworks[1]:
            raise UsageError(
                f"SOURCE and TARGET are both {frameworks[0]} files; give one of each framework"
            )
        if not self.source.is_file():
            raise UsageError(f"SOURCE '{self.source}' is not a file; give a trained model")
        if self.check and not self.target.is_file():
            raise UsageError(f"TARGET '{self.target}' is not a file; omit --check to write it")
        if not self.check and os.path.lexists(self.target):
            raise AlreadyExists(
                f"TARGET '{self.target}' exists and is never overwritten; choose another name, or "
                "add --check to compare the two"
            )
        if not self.target.parent.is_dir():
            raise UsageError(f"'{self.target.parent}' is not a folder; make it, or choose another")
        if ":" not in self.model and registry.find(self.model) is None:
            model_spec.find_factory(self.model)  # it raises the error


def framework_of(path: Path) -> Framework:
    """The framework of a file, by its name.

    Raises:
        UsageError: files of this kind are not converted.
    """
    if path.name.endswith((KERAS_SUFFIX, keras_guard.WEIGHTS_SUFFIX)):
        return Framework.TENSORFLOW
    if path.suffix in TORCH_SUFFIXES:
        return Framework.PYTORCH
    if path.suffix.lower() in keras_guard.LEGACY_SUFFIXES:
        raise keras_guard.hdf5_refusal(path)
    remedy = ""
    if ".ckpt" in path.name or path.suffix == ".index":
        remedy = "; restore a TensorFlow checkpoint in Keras and call save_weights('m.weights.h5')"
    known = (*sorted(TORCH_SUFFIXES), KERAS_SUFFIX, keras_guard.WEIGHTS_SUFFIX)
    raise UsageError(f"'{path.name}' has no known extension: use {', '.join(known)}{remedy}")
