"""Texts for a version, and the answers of ``transformers``' pipeline to them.

The gateway's answers have to equal them: from the text, through tokenizer and model, to the label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from modelport.exporters.errors import ParityError
from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.gateway.repository import text_settings
from modelport.gateway.repository.text_settings import TextSettings, TextTask
from modelport.gateway.types import Array

#: Words in several scripts, case, accents, punctuation, numbers, and no word at all.
TEXTS = (
    "hello world",
    "The quick brown fox jumps over the lazy dog.",
    "I don't like U.S. tax-law (2024), it's 3.14 % too COMPLEX!",
    "naïve café — Zürich, Łódź; ÉCOLE",
    "東京は晴れです 🙂 مرحبا привет",
    " \t\n ",
    "x",
    "antidisestablishmentarianism " * 3,
)
#: Random words of the vocabulary in a text.
_WORDS = (3, 12)
#: Candidates of zero-shot classification.
_LABELS = ("urgent", "sport", "not urgent")
_QUESTION = "what"
#: Tokens of a window, that windows share, and of the longest answer.
_WINDOW, _STRIDE, _ANSWER = 384, 128, 15
#: The largest error of a score or a vector's value.
_ATOL = 1e-4

Items = list[dict[str, Any]]


class TextCase(NamedTuple):
    """A request of texts, and the pipeline's answer: items, or a vector, for each text."""

    texts: Sequence[str]
    inputs: Mapping[str, Array]
    answer: Sequence[Items | Array]


def settings_of(source: Source) -> TextSettings | None:
    """The text interface that ``source`` is published with."""
    content = source.companions.get(text_settings.FILENAME)
    return None if content is None else text_settings.parse(content)


def cases(source: Source, seed: int) -> list[TextCase]:
    """Make requests of texts with the answers of the pipeline; none without a text interface."""
    settings = settings_of(source)
    if settings is None:
        return []
    # It imports torch, which a version without texts may not need.
    from modelport.exporters.sources.huggingface import text_interface

    with text_interface.tokenizer_of(source.companions) as tokenizer, quiet():
        tokenizer.model_max_length = settings.max_tokens
        texts = _texts(tokenizer, settings, seed)
        return _MAKERS[settings.task](source, tokenizer, settings, texts)


def check(case: TextCase, outputs: Mapping[str, Array]) -> None:
    """Compare the gateway's answer with the pipeline's.

    Raises:
        ParityError: they differ; the message has the text.
    """
    if "embedding" in outputs:
        found: Sequence[Items | Array] = list(outputs["embedding"])
    else:
        found = _items(outputs)
    for text, ours, theirs in zip(case.texts, found, case.answer, strict=True):
        if isinstance(ours, list) and isinstance(theirs, list):
            same = _same_items(ours, theirs)
        else:
            same = np.allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-3, atol=_ATOL)
        if not same:
            raise ParityError(
                f"the gateway answers the text {text[:60]!r} otherwise than transformers' "
                f"pipeline: {str(ours)[:200]}, not {str(theirs)[:200]}; please report this with "
                "the model"
            )


def _same_items(ours: Items, theirs: Items) -> bool:
    """Whether items are equal up to rounding; at the end, items of equal scores may differ."""
    if len(ours) != len(theirs):
        return False
    expected = {_key(item): float(item["score"]) for item in theirs}
    least = min(expected.values(), default=0.0)
    return all(
        abs(item["score"] - expected.get(_key(item), least)) <= _ATOL + 1e-3 * abs(item["score"])
        for item in ours
    )


def _key(item: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(sorted((name, value) for name, value in item.items() if name != "score"))


def _items(outputs: Mapping[str, Array]) -> list[Items]:
    """Items of each text, from tensors that are filled up with -1."""
    rows = []
    for row in zip(*(array.tolist() for array in outputs.values()), strict=True):
        entries = (dict(zip(outputs, item, strict=True)) for item in zip(*row, strict=True))
        kept = (entry for entry in entries if entry["score"] != -1)
        rows.append(
            [{n: v.decode() if type(v) is bytes else v for n, v in e.items()} for e in kept]
        )
    return rows


def _texts(tokenizer: Any, settings: TextSettings, seed: int) -> list[str]:
    """``TEXTS``, words that the tokenizer knows, and a text about as long as texts may be."""
    rng = np.random.default_rng(seed)
    words = sorted(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens))
    some = [
        tokenizer.convert_tokens_to_string([str(each) for each in rng.choice(words, int(size))])
        for size in rng.integers(*_WORDS, 8)
    ]
    return [*TEXTS, *some, " ".join(TEXTS[:4] * (settings.max_tokens // 40 + 1))]


def _strings(texts: Sequence[str]) -> Array:
    found = np.empty(len(texts), dtype=object)
    found[:] = [text.encode("utf-8", "replace") for text in texts]
    return found


def _fitting(texts: Sequence[str], tokenizer: Any, settings: TextSettings) -> list[str]:
    """The texts that the model takes whole."""
    return [text for text in texts if len(tokenizer(text)["input_ids"]) <= settings.max_tokens]


def _pipeline(task: str, source: Source, tokenizer: Any) -> Callable[..., Any]:
    import transformers

    make: Callable[..., Callable[..., Any]] = transformers.pipeline
    return make(task, model=source.model.model, tokenizer=tokenizer, device="cpu")


def _classified(
    source: Source, tokenizer: Any, settings: TextSettings, texts: list[str]
) -> list[TextCase]:
    pipe = _pipeline("text-classification", source, tokenizer)
    whole = _fitting(texts, tokenizer, settings)
    found = [TextCase(whole, {"text": _strings(whole)}, pipe(whole, top_k=None))]
    short = [text for text in whole if len(tokenizer(text)["input_ids"]) * 2 < settings.max_tokens]
    if short:
        others = short[::-1]
        asked = [{"text": a, "text_pair": b} for a, b in zip(short, others, strict=True)]
        inputs = {"text": _strings(short), "text_pair": _strings(others)}
        found.append(TextCase(short, inputs, [pipe(each, top_k=None) for each in asked]))
    if any(label.lower().startswith("entail") for label in settings.labels):
        found.append(_zero_shot(source, tokenizer, [text for text in texts if text.strip()]))
    return found


def _zero_shot(source: Source, tokenizer: Any, texts: list[str]) -> TextCase:
    pipe = _pipeline("zero-shot-classification", source, tokenizer)
    answer = [
        [
            {"label": label, "score": score}
            for label, score in zip(each["labels"], each["scores"], strict=True)
        ]
        for each in pipe(texts, candidate_labels=list(_LABELS))
    ]
    inputs = {"text": _strings(texts), "candidate_labels": _strings(_LABELS)}
    return TextCase(texts, inputs, answer)


def _tagged(
    source: Source, tokenizer: Any, settings: TextSettings, texts: list[str]
) -> list[TextCase]:
    pipe = _pipeline("token-classification", source, tokenizer)
    return [TextCase(texts, {"text": _strings(texts)}, pipe(texts))]


def _filled(
    source: Source, tokenizer: Any, settings: TextSettings, texts: list[str]
) -> list[TextCase]:
    masked = [f"{text.strip()} {tokenizer.mask_token}" for text in texts]
    masked = [
        text
        for text in _fitting(masked, tokenizer, settings)
        if tokenizer(text)["input_ids"].count(tokenizer.mask_token_id) == 1
    ]
    pipe = _pipeline("fill-mask", source, tokenizer)
    return [TextCase(masked, {"text": _strings(masked)}, [pipe(text) for text in masked])]


def _embedded(
    source: Source, tokenizer: Any, settings: TextSettings, texts: list[str]
) -> list[TextCase]:
    """Vectors of the checkpoint; ``transformers`` has no pipeline that pools."""
    rows = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, return_tensors="np")
        outputs = source.reference({s.name: tokens[s.name] for s in source.signature.inputs})
        vector = outputs[settings.pooled or "last_hidden_state"][0]
        rows.append(vector if settings.pooled else vector.mean(axis=0))
    return [TextCase(texts, {"text": _strings(texts)}, rows)]


def _answered(
    source: Source, tokenizer: Any, settings: TextSettings, texts: list[str]
) -> list[TextCase]:
    """The likeliest span of each text, by trying all; ``transformers`` 5 has no such pipeline."""
    asked = [text for text in texts if text.strip()]
    rows = [[_best_span(source, tokenizer, settings, text)] for text in asked]
    inputs = {"question": _strings([_QUESTION] * len(asked)), "context": _strings(asked)}
    return [TextCase(asked, inputs, rows)]


def _best_span(
    source: Source, tokenizer: Any, settings: TextSettings, context: str
) -> dict[str, Any]:
    most = min(_WINDOW, settings.max_tokens)
    windows = tokenizer(
        _QUESTION,
        context,
        truncation="only_second",
        max_length=most,
        stride=min(most // 2, _STRIDE),
        return_overflowing_tokens=True,
    )
    found: dict[str, dict[str, Any]] = {}
    for window in windows.encodings:
        for score, first, last in _spans(source, tokenizer, window):
            ends = [window.token_to_word(place) for place in (first, last)]
            start = window.word_to_chars(ends[0], 1)[0]
            end = window.word_to_chars(ends[1], 1)[1]
            item = {"score": 0.0, "start": start, "end": end, "answer": context[start:end]}
            found.setdefault(context[start:end].lower(), item)["score"] += score
    return max(found.values(), key=lambda item: float(item["score"]))


def _spans(source: Source, tokenizer: Any, window: Any) -> list[tuple[float, int, int]]:
    """The twelve likeliest spans of a window."""
    values = {
        "input_ids": window.ids,
        "attention_mask": window.attention_mask,
        "token_type_ids": window.type_ids,
    }
    outputs = source.reference(
        {s.name: np.array([values[s.name]], np.int64) for s in source.signature.inputs}
    )
    places = [i for i, part in enumerate(window.sequence_ids) if part == 1]
    counted = [*places, *(i for i, t in enumerate(window.ids) if t == tokenizer.cls_token_id)]
    chances = []
    for name in ("start_logits", "end_logits"):
        powers = np.exp(outputs[name][0] - outputs[name][0][counted].max())
        chances.append(powers / powers[counted].sum())
    every = [
        (float(chances[0][first] * chances[1][last]), first, last)
        for first in places
        for last in places
        if first <= last < first + _ANSWER
    ]
    return sorted(every, reverse=True)[:12]


_MAKERS: Mapping[TextTask, Callable[..., list[TextCase]]] = {
    TextTask.CLASSIFICATION: _classified,
    TextTask.TOKENS: _tagged,
    TextTask.FILL_MASK: _filled,
    TextTask.EMBEDDING: _embedded,
    TextTask.QUESTIONS: _answered,
}
