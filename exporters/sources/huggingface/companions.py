"""Tokenizer and preprocessor files that travel with an artifact.

Only files of these names are copied, and only data: nothing that names code (``auto_map``) or holds
some (``chat_template``, a Jinja program), and no link out of the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelport.exporters.sources.huggingface.folder import (
    CONFIG,
    PREPROCESSOR,
    json_object,
    read_bytes,
)
from modelport.gateway.errors import IntegrityError

JSON = (
    CONFIG,
    PREPROCESSOR,
    "added_tokens.json",
    "byte_maps.json",
    "emoji.json",
    "entity_vocab.json",
    "generation_config.json",
    "normalizer.json",
    "processor_config.json",
    "special_tokens_map.json",
    "target_vocab.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "vocab.json",
    "word_pronunciation.json",
    "word_shape.json",
)
TEXT = ("bpe.codes", "dict.txt", "merges.txt", "prophetnet.tokenizer", "vocab.txt")
#: SentencePiece's protocol buffers.
BINARY = (
    *("sentencepiece.bpe.model", "sentencepiece.model", "source.spm", "spiece.model"),
    *("spm.model", "spm_char.model", "target.spm", "tokenizer.model"),
)

LEFT_OUT = frozenset({"auto_map", "chat_template", "custom_pipelines"})


def read(folder: Path, model: Path | None = None) -> dict[str, bytes]:
    """The files of ``folder`` that travel, by name.

    Args:
        model: the folder that ``folder`` lies in; None: it is the whole model.

    Raises:
        IntegrityError: a file is no JSON, no text, too large, or a link to somewhere else.
        UsageError: a file cannot be read.
    """
    return {path.name: _content(path) for path in _present(folder, model or folder)}


def _present(folder: Path, model: Path) -> Iterator[Path]:
    whole = model.resolve()
    # In the cache of huggingface_hub, snapshots/COMMIT/FILE links to blobs/DIGEST.
    allowed = (
        whole / folder.relative_to(model),
        *(parent / "blobs" for parent in whole.parents[1:2]),
    )
    for name in (*JSON, *TEXT, *BINARY):
        path = folder / name
        if not path.is_file():
            continue
        if path.resolve().parent not in allowed:
            raise IntegrityError(
                f"'{path}' is a link out of its folder; replace it by a copy of the file"
            )
        yield path


def _content(path: Path) -> bytes:
    content = read_bytes(path)
    if path.name in TEXT:
        try:
            content.decode()
        except UnicodeDecodeError as error:
            raise IntegrityError(f"'{path}' is not UTF-8 text; copy the folder again") from error
    return _without_code(path, content) if path.name in JSON else content


def _without_code(path: Path, content: bytes) -> bytes:
    """``content`` as it is, unless it has an entry with code."""
    found: list[str] = []

    def leave_out(value: dict[str, Any]) -> dict[str, Any]:
        if LEFT_OUT.isdisjoint(value):
            return value
        found.extend(LEFT_OUT & value.keys())
        return {name: entry for name, entry in value.items() if name not in LEFT_OUT}

    kept = json_object(path, content, leave_out)
    if not found:
        return content
    return (json.dumps(kept, indent=2) + "\n").encode()
