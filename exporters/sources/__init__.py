"""Readers of trained models: PyTorch checkpoints, Hugging Face folders, Keras files, SavedModels.

To add one, write a module with ``load(request) -> Source`` here, and choose it in
``reader_selection``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_MAX_BATCH_SIZE = 8
#: Extensions of PyTorch checkpoints.
PICKLED = frozenset({".pt", ".pth", ".bin", ".ckpt", ".tar", ".th"})
SAFETENSORS = frozenset({".safetensors"})


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """The checkpoint to load, and the model to load it into.

    Attributes:
        model: a registered name or ``package.module:factory``, or the module that registers the
            classes of a Keras file; None: the checkpoint determines it.
        lora: a folder of adapters to merge.
        inputs: declarations ``NAME:DATATYPE[DIMS]`` for a model without a signature.
        output_names: names of that model's outputs.
        masks: declarations of its masks, ``NAME[:PADDING][=OUTPUT,...]``.
        task: the task to export a Hugging Face folder for, or the signature of a SavedModel; None:
            its architecture's, or the default.
        long_texts: ``truncate`` or ``refuse`` texts that are too long; None: as the pipeline does.
    """

    checkpoint: Path
    model: str | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    lora: Path | None = None
    inputs: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    task: str | None = None
    long_texts: str | None = None
