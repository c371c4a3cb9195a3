"""Readers of trained models: PyTorch checkpoints, Hugging Face folders, Keras files, SavedModels.

The file or folder at ``checkpoint`` determines the reader.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelport.exporters.loaded_model import Source
from modelport.gateway.cli.errors import UsageError, missing_extra

DEFAULT_MAX_BATCH_SIZE = 8

KERAS_SUFFIXES = frozenset({".keras", ".h5", ".hdf5"})
SAVED_MODEL = "saved_model.pb"
HUGGING_FACE = "config.json"


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """The checkpoint to load, and the model to load it into.

    Attributes:
        model: a registered name or ``package.module:factory``; None: the checkpoint determines it.
        lora: a folder of adapters to merge.
        inputs: declarations ``NAME:DATATYPE[DIMS]`` for a model without a signature.
        output_names: names of that model's outputs.
    """

    checkpoint: Path
    model: str | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    lora: Path | None = None
    inputs: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()


def load(request: SourceRequest) -> Source:
    """Load the model that ``request`` names, with its weights.

    Raises:
        UsageError: there is no such checkpoint, or it does not fit the model.
        IntegrityError: the checkpoint is damaged or wants to run code.
        Unsupported: a required library is not installed.
    """
    path = request.checkpoint
    if not path.exists():
        raise UsageError(f"checkpoint '{path}' does not exist; give the path of a trained model")
    reader = _reader(path)
    if request.lora is not None and reader != "huggingface":
        raise UsageError(f"--lora needs a Hugging Face folder as checkpoint, not '{path}'")
    if reader == "tensorflow" and (request.inputs or request.output_names):
        raise UsageError(f"'{path}' declares its own signature; leave --input and --output-name")
    try:
        module = importlib.import_module(f"modelport.exporters.sources.{reader}")
    except ImportError as error:
        raise missing_extra(error) from error
    source: Source = module.load(request)
    return source


def _reader(path: Path) -> str:
    if path.suffix.lower() in KERAS_SUFFIXES or (path / SAVED_MODEL).is_file():
        return "tensorflow"
    if (path / HUGGING_FACE).is_file():
        return "huggingface"
    if path.is_dir():
        raise UsageError(
            f"checkpoint '{path}' is a folder with neither {HUGGING_FACE} (Hugging Face) nor "
            f"{SAVED_MODEL} (TensorFlow) in it; give the path of a trained model"
        )
    return "pytorch"
