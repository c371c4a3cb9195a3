"""``text.json``: what makes a model's tensors of texts, and answers of its outputs.

The exporters write it into the version, beside ``tokenizer.json``; manifest and certificate cover
both.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.manifest import MALFORMED

FILENAME, TOKENIZER = "text.json", "tokenizer.json"
FORMAT = "modelport-text/1"
MAX_SETTINGS_BYTES, MAX_TOKENIZER_BYTES = 16 << 20, 128 << 20


class TextTask(StrEnum):
    """The tasks, by the names of ``transformers``' pipelines."""

    CLASSIFICATION = "text-classification"
    TOKENS = "token-classification"
    QUESTIONS = "question-answering"
    FILL_MASK = "fill-mask"
    EMBEDDING = "feature-extraction"


class ScoreFunction(StrEnum):
    """The function that makes scores of a classifier's logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    NONE = "none"


class LongTexts(StrEnum):
    """The treatment of a text of more than ``max_tokens``."""

    TRUNCATE = "truncate"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class TextSettings:
    """The text interface of a version.

    Attributes:
        max_tokens: the longest sequence, special tokens included.
        pad: the id that fills shorter sequences; None: sequences of one length are batched.
        left: padding and truncation are on the left.
        labels: class names, by index.
        pooled: the output with one vector for each text; empty: the mean of ``last_hidden_state``.
        clean: whether decoded text loses the spaces before punctuation.
    """

    task: TextTask
    max_tokens: int
    long_texts: LongTexts = LongTexts.REFUSE
    pad: int | None = None
    pad_type: int = 0
    pad_left: bool = False
    truncate_left: bool = False
    unknown: int | None = None
    mask: int | None = None
    cls: int | None = None
    labels: tuple[str, ...] = ()
    function: ScoreFunction = ScoreFunction.SOFTMAX
    pooled: str = ""
    clean: bool = False

    def to_json(self) -> bytes:
        document = {"format": FORMAT, **dataclasses.asdict(self)}
        return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def parse(content: bytes) -> TextSettings:
    """Parse the file's content.

    Raises:
        IntegrityError: it is not such a file.
    """
    try:
        document = json.loads(content)
        if document.pop("format") != FORMAT:
            raise ValueError("format")
        document["task"] = TextTask(document["task"])
        document["long_texts"] = LongTexts(document["long_texts"])
        document["function"] = ScoreFunction(document["function"])
        document["labels"] = tuple(document["labels"])
        settings = TextSettings(**document)
        _check(settings)
    except MALFORMED as error:
        raise IntegrityError(
            f"{FILENAME} is not a description of a text interface; publish the version again"
        ) from error
    return settings


def _check(settings: TextSettings) -> None:
    for name in ("pad", "unknown", "mask", "cls"):
        _require(getattr(settings, name), optional=True)
    _require(settings.pad_type)
    _require(settings.max_tokens)
    flags = (settings.pad_left, settings.truncate_left, settings.clean)
    texts = (*settings.labels, settings.pooled)
    if {*map(type, flags)} != {bool} or {*map(type, texts)} != {str} or not settings.max_tokens:
        raise TypeError


def _require(value: Any, optional: bool = False) -> None:
    """Raise unless ``value`` is a number that a tensor of ids holds."""
    if (value is None and optional) or (type(value) is int and 0 <= value < 1 << 31):
        return
    raise TypeError(value)


def read(version: Path) -> tuple[TextSettings, str] | None:
    """The settings of a version and its tokenizer's JSON; None: it takes no texts.

    Raises:
        IntegrityError: a file is missing, too large or malformed.
    """
    try:
        content = untrusted_files.read(version / FILENAME, MAX_SETTINGS_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IntegrityError(f"{FILENAME} cannot be read: {error.strerror}") from error
    try:
        tokenizer = untrusted_files.read(version / TOKENIZER, MAX_TOKENIZER_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise IntegrityError(f"{TOKENIZER} cannot be read: {reason}") from error
    return parse(content), tokenizer
