"""``token-classification``: the entities in each text, by token or in groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from modelport.gateway.inference.text import answers
from modelport.gateway.inference.text.tasks import TEXT, TRUNCATE, Outputs, item_specs
from modelport.gateway.inference.text.text_request import TextRequest
from modelport.gateway.inference.text.tokenizing import TextTokenizer, truncates
from modelport.gateway.repository.text_settings import TextSettings
from modelport.gateway.types import Array, Datatype, Tensor

if TYPE_CHECKING:
    from tokenizers import Encoding

_STRATEGY = "aggregation_strategy"
_NONE, _SIMPLE, _FIRST, _AVERAGE, _MAX = STRATEGIES = ("none", "simple", "first", "average", "max")
#: The label of tokens outside of entities.
_OUTSIDE = "O"


class _Token(NamedTuple):
    """A token, or a word of several: its scores by label, and its place in the text."""

    word: str
    scores: Array
    start: int
    end: int
    place: int
    continues: bool

    @property
    def label(self) -> int:
        return int(self.scores.argmax())


class TokenClassification:
    """Finds entities."""

    inputs = (TEXT,)
    outputs = item_specs(
        entity=Datatype.BYTES, entity_group=Datatype.BYTES, score=Datatype.FP32,
        index=Datatype.INT64, word=Datatype.BYTES, start=Datatype.INT64, end=Datatype.INT64,
    )  # fmt: skip
    options = (_STRATEGY, TRUNCATE)
    reads = ("logits",)

    def __init__(self, tokenizer: TextTokenizer, settings: TextSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings

    def encode(self, request: TextRequest) -> list[Encoding]:
        truncate = truncates(self._settings, request.flag(TRUNCATE))
        return self._tokenizer.encode(request.strings[TEXT.name], truncate, offsets=True)

    def reduce(self, request: TextRequest, sequence: Encoding, outputs: Outputs) -> Array:
        return answers.softmax(outputs["logits"].astype(np.float32))

    def answer(
        self, request: TextRequest, sequences: Sequence[Encoding], reduced: Sequence[Array]
    ) -> list[Tensor]:
        strategy = request.text(_STRATEGY, _NONE, STRATEGIES)
        texts = request.strings[TEXT.name]
        rows = [
            self._entities(strategy, self._tokens(text, sequence, scores))
            for text, sequence, scores in zip(texts, sequences, reduced, strict=True)
        ]
        left_out = ("entity_group",) if strategy == _NONE else ("entity", "index")
        specs = [spec for spec in self.outputs if spec.name not in left_out]
        return answers.tensors(rows, specs)

    def _tokens(self, text: str, sequence: Encoding, scores: Array) -> list[_Token]:
        found = []
        places = zip(
            *(
                sequence.ids,
                sequence.tokens,
                sequence.offsets,
                sequence.special_tokens_mask,
                scores,
            ),
            strict=True,
        )
        for index, (token, word, (start, end), special, each) in enumerate(places):
            if special:
                continue
            if self._tokenizer.has_words:
                continues = len(word) != end - start
            else:
                continues = start > 0 and " " not in text[start - 1 : start + 1]
            if token == self._settings.unknown:
                word, continues = text[start:end], False
            found.append(_Token(word, each, start, end, index, continues))
        return found

    def _entities(self, strategy: str, tokens: list[_Token]) -> list[dict[str, Any]]:
        labels = self._settings.labels
        if strategy == _NONE:
            return [
                {
                    "entity": labels[token.label], "score": token.scores[token.label],
                    "index": token.place, "word": token.word, "start": token.start,
                    "end": token.end,
                }
                for token in tokens
                if labels[token.label] != _OUTSIDE
            ]  # fmt: skip
        if strategy != _SIMPLE:
            tokens = [self._word(strategy, parts) for parts in _words(tokens)]
        groups = (self._group(parts) for parts in self._groups(tokens))
        return [group for group in groups if group["entity_group"] != _OUTSIDE]

    def _word(self, strategy: str, parts: Sequence[_Token]) -> _Token:
        first, last = parts[0], parts[-1]
        if strategy == _FIRST:
            scores = first.scores
        elif strategy == _MAX:
            scores = max(parts, key=lambda part: float(part.scores.max())).scores
        else:
            scores = np.mean([part.scores for part in parts], axis=0)
        word = self._tokenizer.joined([part.word for part in parts])
        return first._replace(word=word, scores=scores, end=last.end)

    def _groups(self, tokens: Iterable[_Token]) -> list[list[_Token]]:
        """Adjacent tokens of one kind; a label ``B-KIND`` begins another group."""
        groups: list[list[_Token]] = []
        before = ""
        for token in tokens:
            label = self._settings.labels[token.label]
            kind = label[2:] if label.startswith(("B-", "I-")) else label
            if groups and kind == before and not label.startswith("B-"):
                groups[-1].append(token)
            else:
                groups.append([token])
            before = kind
        return groups

    def _group(self, parts: Sequence[_Token]) -> dict[str, Any]:
        first = self._settings.labels[parts[0].label]
        return {
            "entity_group": first.partition("-")[2] or first,
            "score": np.mean([part.scores[part.label] for part in parts]),
            "word": self._tokenizer.joined([part.word for part in parts]),
            "start": parts[0].start,
            "end": parts[-1].end,
        }


def _words(tokens: Sequence[_Token]) -> list[list[_Token]]:
    """Tokens by word."""
    words: list[list[_Token]] = []
    for token in tokens:
        if words and token.continues:
            words[-1].append(token)
        else:
            words.append([token])
    return words
