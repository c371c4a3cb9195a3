"""The text interface of a folder's model: its tokenizer and the task, as ``text.json`` declares.

``transformers`` opens the tokenizer, because its configuration may change what ``tokenizer.json``
says. What it opens is the companions alone, which hold no code.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources.huggingface import companions, sentence
from modelport.exporters.sources.huggingface.task_model import TaskModel
from modelport.gateway.errors import UsageError
from modelport.gateway.repository.text_settings import (
    FILENAME,
    TOKENIZER,
    LongTexts,
    ScoreFunction,
    TextSettings,
    TextTask,
)

_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids"})
_NAMES = {task.value: task for task in TextTask} | {"sentence-similarity": TextTask.EMBEDDING}
#: Tasks whose pipelines cut long texts by themselves.
_CUT = (TextTask.TOKENS, TextTask.EMBEDDING)
#: Outputs with one vector for each text, the preferred ones first.
_POOLED = (sentence.SENTENCE, "text_embeds")
#: Files without which ``transformers`` opens a tokenizer that knows no words.
_VOCABULARIES = frozenset({TOKENIZER, "vocab.json", *companions.TEXT, *companions.BINARY})
#: Entries of ``tokenizer.json`` that the gateway sets itself.
_OWN = ("padding", "truncation")


@contextmanager
def tokenizer_of(files: Mapping[str, bytes]) -> Iterator[Any]:
    """The tokenizer in ``files``; None if there is none that ``tokenizers`` runs."""
    with tempfile.TemporaryDirectory() as name, quiet():
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        yield _opened(Path(name))


def _opened(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        found("\N{SNOWMAN}")  # hardly a word of the vocabulary
    except Exception:  # it lacks files, a library, or a token for unknown words
        return None
    return found if getattr(found, "is_fast", False) and len(found) else None


def describe(source: Source, long_texts: str | None) -> Source:
    """Add the text interface to the companions of ``source``, if it can have one.

    Args:
        long_texts: what happens to texts that are too long; None: as the task's pipeline does.

    Raises:
        UsageError: ``long_texts`` is no choice, or given for a model without a text interface.
    """
    if long_texts not in (None, *LongTexts):
        raise UsageError(f"--long-texts must be {' or '.join(LongTexts)}, not '{long_texts}'")
    if _fits(source):
        with tokenizer_of(source.companions) as tokenizer:
            settings = tokenizer and _settings(source, tokenizer, long_texts)
            if settings is not None:
                content = _effective(source.companions.get(TOKENIZER), tokenizer)
                added = {TOKENIZER: content, FILENAME: settings.to_json()}
                return replace(source, companions={**source.companions, **added})
    if long_texts is not None:
        raise UsageError(
            "--long-texts is for a Hugging Face folder with a tokenizer and a task for texts, "
            "which this is not; omit it"
        )
    return source


def _fits(source: Source) -> bool:
    """Whether the model takes batches of token ids alone, and the folder has a vocabulary."""
    inputs = {spec.name: spec.dims for spec in source.signature.inputs}
    return (
        isinstance(source.model, TaskModel)
        and source.model.task in _NAMES
        and "input_ids" in inputs
        and inputs.keys() <= _INPUTS
        and source.signature.max_batch_size > 0
        and not _VOCABULARIES.isdisjoint(source.companions)
    )


def _settings(source: Source, tokenizer: Any, long_texts: str | None) -> TextSettings | None:
    module: TaskModel = source.model
    task, config = _NAMES[module.task], module.model.config
    outputs = [spec.name for spec in source.signature.outputs]
    pooled = next((name for name in _POOLED if name in outputs), "")
    if task is TextTask.EMBEDDING and not pooled and "last_hidden_state" not in outputs:
        return None
    if task is TextTask.FILL_MASK and tokenizer.mask_token_id is None:
        return None
    default = LongTexts.TRUNCATE if task in _CUT else LongTexts.REFUSE
    labels = getattr(config, "id2label", None) or {}
    return TextSettings(
        task=task,
        max_tokens=_max_tokens(source, tokenizer),
        long_texts=default if long_texts is None else LongTexts(long_texts),
        pad=tokenizer.pad_token_id,
        pad_type=tokenizer.pad_token_type_id,
        pad_left=tokenizer.padding_side == "left",
        truncate_left=tokenizer.truncation_side == "left",
        unknown=tokenizer.unk_token_id,
        mask=tokenizer.mask_token_id,
        cls=tokenizer.cls_token_id,
        labels=tuple(str(labels[index]) for index in sorted(labels))
        if task in (TextTask.CLASSIFICATION, TextTask.TOKENS)
        else (),
        function=_function(config),
        pooled=pooled if task is TextTask.EMBEDDING else "",
        clean=bool(tokenizer.clean_up_tokenization_spaces)
        and type(tokenizer.backend_tokenizer.model).__name__ != "BPE",
    )


def _max_tokens(source: Source, tokenizer: Any) -> int:
    (spec,) = (spec for spec in source.signature.inputs if spec.name == "input_ids")
    dim = spec.dims[0]
    most = source.signature.axes[dim].maximum if isinstance(dim, str) else dim
    return min(int(tokenizer.model_max_length), most or 1 << 30, 1 << 30)


def _function(config: Any) -> ScoreFunction:
    """The function of the pipeline for this configuration."""
    kind = getattr(config, "problem_type", None)
    if kind == "regression":
        return ScoreFunction.NONE
    if kind == "multi_label_classification" or getattr(config, "num_labels", 2) == 1:
        return ScoreFunction.SIGMOID
    return ScoreFunction.SOFTMAX


def _effective(content: bytes | None, tokenizer: Any) -> bytes:
    """The folder's ``tokenizer.json``, or the tokenizer's own if the two differ."""
    own = tokenizer.backend_tokenizer.to_str(pretty=True).encode()
    if content is not None and _rest(content) == _rest(own):
        return content
    return bytes(own)


def _rest(content: bytes) -> dict[str, Any]:
    return {name: value for name, value in json.loads(content).items() if name not in _OWN}
