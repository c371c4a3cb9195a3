"""Facts about a folder and its model that the inputs of a task depend on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelport.exporters.model_spec import AttentionMask
from modelport.exporters.models.causal_lm import DEFAULT_MAX_POSITIONS
from modelport.exporters.sources.huggingface.folder import Folder, read_json
from modelport.gateway.errors import UsageError
from modelport.gateway.types import Axis, Datatype, TensorSpec

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class TaskInputs:
    """Inputs in the order of ``forward``'s arguments, their axes and masks.

    Attributes:
        pairs: texts and images are batches of their own; then ``max_batch_size`` is 0.
        limited: the axis whose bounds the model itself may narrow: its maximum may be the number
            of position embeddings.
        waveforms: inputs that are sound.
    """

    specs: tuple[TensorSpec, ...]
    axes: Mapping[str, Axis] = field(default_factory=dict)
    masks: tuple[AttentionMask, ...] = ()
    pairs: bool = False
    limited: str | None = None
    waveforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that inputs depend on."""

    folder: Folder
    config: Any
    arguments: Mapping[str, inspect.Parameter]
    kwargs: Mapping[str, Any]
    padding: str
    sequence: str = "sequence"

    @property
    def text(self) -> Any:
        return self.config.get_text_config()

    def positions(self) -> int:
        """The longest sequence to serve: the model's own, ``max_positions``, or the default."""
        limit = attribute(self.text, "max_position_embeddings")
        longest = limit if isinstance(limit, int) and limit > 0 else None
        default = min(longest or 1 << 30, self._tokenizer_length(), DEFAULT_MAX_POSITIONS)
        wanted = self.kwargs.get("max_positions", default)
        if type(wanted) is not int or not 1 <= wanted <= (longest or 1 << 30):
            raise UsageError(
                f"--model-kwargs: max_positions is {wanted!r}; '{self.folder.path}' takes "
                f"{f'1 to {longest}' if longest else 'a positive number'}"
            )
        return wanted

    def _tokenizer_length(self) -> int:
        """The length to which the tokenizer cuts; a huge number stands for none."""
        path = self.folder.path / TOKENIZER_CONFIG
        length = read_json(path).get("model_max_length") if path.is_file() else None
        return length if type(length) is int and length > 0 else 1 << 30


def attribute(config: Any, name: str) -> Any:
    """An entry of a configuration, or None."""
    return getattr(config, name, None)


def tokens(name: str, axis: str, size: int) -> TensorSpec:
    """Ids below ``size`` along ``axis``."""
    return TensorSpec(name, Datatype.INT64, (axis,), 0, size - 1)
