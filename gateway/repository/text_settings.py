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
from typing import Annotated, ClassVar

from pydantic import Field

from modelport.gateway.errors import IntegrityError, InvalidArgument
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.manifest import MALFORMED
from modelport.gateway.runtime import checked_json
from modelport.gateway.runtime.checked_json import STRICT

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


#: An id, or a number of tokens, that a tensor of ids holds.
TokenNumber = Annotated[int, Field(ge=0, lt=1 << 31)]


@dataclass(frozen=True, slots=True, kw_only=True)
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

    __pydantic_config__: ClassVar = STRICT

    task: TextTask
    max_tokens: Annotated[TokenNumber, Field(gt=0)]
    long_texts: LongTexts
    pad: TokenNumber | None = None
    pad_type: TokenNumber = 0
    pad_left: bool = False
    truncate_left: bool = False
    unknown: TokenNumber | None = None
    mask: TokenNumber | None = None
    cls: TokenNumber | None = None
    labels: tuple[str, ...]
    function: ScoreFunction
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
        return checked_json.read(TextSettings, json.dumps(document).encode())
    except (*MALFORMED, InvalidArgument) as error:
        raise IntegrityError(
            f"{FILENAME} is not a description of a text interface; publish the version again"
        ) from error


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
