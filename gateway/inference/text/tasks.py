"""Tasks: the sequences that a request becomes, and the answer that the outputs give.

Answers are those of ``transformers``' pipelines of the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.text import answers
from modelport.gateway.inference.text.text_request import TextRequest
from modelport.gateway.inference.text.tokenizing import (
    MAX_SEQUENCES,
    Text,
    TextTokenizer,
    truncates,
)
from modelport.gateway.repository.text_settings import ScoreFunction, TextSettings
from modelport.gateway.types import Array, Datatype, Tensor, TensorSpec

if TYPE_CHECKING:
    from tokenizers import Encoding

TEXT = TensorSpec("text", Datatype.BYTES, ())
PAIR = TensorSpec("text_pair", Datatype.BYTES, (), optional=True)
CANDIDATES = TensorSpec("candidate_labels", Datatype.BYTES, (-1,), optional=True)
TRUNCATE, TOP_K = "truncate", "top_k"
MAX_TOP_K = 1024
HYPOTHESIS = "This example is {}."
#: The outputs of one sequence, by name.
Outputs = Mapping[str, Array]


def item_specs(**datatypes: Datatype) -> tuple[TensorSpec, ...]:
    """Outputs with any number of items for each text."""
    return tuple(TensorSpec(name, datatype, (-1,)) for name, datatype in datatypes.items())


class TextPipeline(Protocol):
    """A task of one version.

    Attributes:
        inputs, outputs: the text interface; the shapes are informative.
        options: names of its parameters.
        reads: the outputs of the model that it needs.
    """

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def options(self) -> tuple[str, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    def encode(self, request: TextRequest) -> list[Encoding]:
        """Make the sequences of a request; raise ``InvalidArgument`` if it has none."""

    def reduce(self, request: TextRequest, sequence: Encoding, outputs: Outputs) -> Any:
        """Reduce what the model says of a sequence, without padding, to what the answer needs."""

    def answer(
        self, request: TextRequest, sequences: Sequence[Encoding], reduced: Sequence[Any]
    ) -> list[Tensor]:
        """Make the answer from what all sequences were reduced to."""


def pairs_of(request: TextRequest) -> list[Text]:
    """The texts of a request, each with its pair if it has one."""
    texts, others = request.strings[TEXT.name], request.strings.get(PAIR.name)
    if others is None:
        return list(texts)
    if len(others) != len(texts):
        raise InvalidArgument(
            f"input '{PAIR.name}' has {len(others)} texts, '{TEXT.name}' has {len(texts)}; they "
            "belong together"
        )
    return list(zip(texts, others, strict=True))


class Classification:
    """``text-classification``; with candidate labels ``zero-shot-classification``."""

    inputs = (TEXT, PAIR, CANDIDATES)
    outputs = item_specs(label=Datatype.BYTES, score=Datatype.FP32)
    options = (TOP_K, "function_to_apply", "multi_label", "hypothesis_template", TRUNCATE)
    reads = ("logits",)

    def __init__(self, tokenizer: TextTokenizer, settings: TextSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        entailing = (label.lower().startswith("entail") for label in settings.labels)
        self._entailment = next((i for i, found in enumerate(entailing) if found), None)

    def encode(self, request: TextRequest) -> list[Encoding]:
        asked = request.flag(TRUNCATE)
        if CANDIDATES.name not in request.strings:
            return self._tokenizer.encode(pairs_of(request), truncates(self._settings, asked))
        if self._entailment is None:
            raise InvalidArgument(
                f"input '{CANDIDATES.name}' is for models with a class 'entailment'; this one has "
                f"{', '.join(self._settings.labels[:8])}"
            )
        if PAIR.name in request.strings:
            raise InvalidArgument(f"'{PAIR.name}' and '{CANDIDATES.name}' exclude each other")
        template = request.text("hypothesis_template", HYPOTHESIS)
        if "{}" not in template:
            raise InvalidArgument("parameter 'hypothesis_template' must contain {}")
        texts, labels = request.strings[TEXT.name], self._candidates(request)
        every: list[Text] = [
            (text, template.replace("{}", label))
            for text, own in zip(texts, labels, strict=True)
            for label in own
        ]
        return self._tokenizer.encode(every, asked is not False, first_only=True)

    def _candidates(self, request: TextRequest) -> list[Sequence[str]]:
        """The candidate labels of each text; one list is for all."""
        count = len(request.strings[TEXT.name])
        labels, shape = request.strings[CANDIDATES.name], request.shapes[CANDIDATES.name]
        own = len(shape) == 2 and shape[0] == count
        size = len(labels) // count if own else len(labels)
        if count * size > MAX_SEQUENCES:
            raise InvalidArgument(
                f"{count} texts with {size} labels are more than {MAX_SEQUENCES} sequences; send "
                "fewer"
            )
        return [labels[i * size * own : i * size * own + size] for i in range(count)]

    def reduce(self, request: TextRequest, sequence: Encoding, outputs: Outputs) -> Array:
        return outputs["logits"].astype(np.float32)

    def answer(
        self, request: TextRequest, sequences: Sequence[Encoding], reduced: Sequence[Array]
    ) -> list[Tensor]:
        if CANDIDATES.name in request.strings:
            rows = self._zero_shot(request, reduced)
        else:
            most = request.count(TOP_K, len(self._settings.labels), MAX_TOP_K)
            rows = [_ranked(self._settings.labels, self._scores(request, each)) for each in reduced]
            rows = [row[:most] for row in rows]
        return answers.tensors(rows, self.outputs)

    def _scores(self, request: TextRequest, logits: Array) -> Array:
        known = [each.value for each in ScoreFunction]
        function = request.text("function_to_apply", self._settings.function.value, known)
        if function == ScoreFunction.SOFTMAX:
            return answers.softmax(logits)
        if function == ScoreFunction.SIGMOID:
            with np.errstate(over="ignore"):
                scores: Array = 1 / (1 + np.exp(-logits))
            return scores
        return logits

    def _zero_shot(self, request: TextRequest, reduced: Sequence[Array]) -> list[list[Any]]:
        entailment = self._entailment
        assert entailment is not None
        multiple, rows, start = request.flag("multi_label"), [], 0
        for labels in self._candidates(request):
            logits = np.stack(reduced[start : start + len(labels)])
            start += len(labels)
            if multiple or len(labels) == 1:
                contradiction = -1 if entailment == 0 else 0
                scores = answers.softmax(logits[:, [contradiction, entailment]])[:, 1]
            else:
                scores = answers.softmax(logits[:, entailment])
            rows.append(_ranked(labels, scores))
        return rows


def _ranked(labels: Sequence[str], scores: Array) -> list[dict[str, Any]]:
    order = np.argsort(-scores, kind="stable").tolist()
    return [{"label": labels[i], "score": scores[i]} for i in order]


class FillMask:
    """``fill-mask``: the likeliest tokens for the mask in each text."""

    inputs = (TEXT,)
    outputs = item_specs(
        score=Datatype.FP32, token=Datatype.INT64, token_str=Datatype.BYTES, sequence=Datatype.BYTES
    )
    options = (TOP_K, TRUNCATE)
    reads = ("logits",)

    def __init__(self, tokenizer: TextTokenizer, settings: TextSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._mask = -1 if settings.mask is None else settings.mask

    def encode(self, request: TextRequest) -> list[Encoding]:
        truncate = truncates(self._settings, request.flag(TRUNCATE))
        found = self._tokenizer.encode(request.strings[TEXT.name], truncate)
        for index, encoding in enumerate(found):
            masks = encoding.ids.count(self._mask)
            if masks != 1:
                raise InvalidArgument(
                    f"text {index + 1} has {masks} masks; put the tokenizer's mask token in once"
                )
        return found

    def reduce(self, request: TextRequest, sequence: Encoding, outputs: Outputs) -> list[Any]:
        ids = sequence.ids
        place = ids.index(self._mask)
        scores = answers.softmax(outputs["logits"][place].astype(np.float32))
        most = min(request.count(TOP_K, 5, MAX_TOP_K), len(scores))
        order = np.argpartition(-scores, most - 1)[:most]
        order = order[np.argsort(-scores[order], kind="stable")]
        return [self._item(ids, place, int(token), scores[token]) for token in order]

    def _item(self, ids: Sequence[int], place: int, token: int, score: float) -> dict[str, Any]:
        filled = [*ids[:place], token, *ids[place + 1 :]]
        kept = [each for each in filled if each != self._settings.pad]
        return {
            "score": score,
            "token": token,
            "token_str": self._tokenizer.decode([token], False),
            "sequence": self._tokenizer.decode(kept, True),
        }

    def answer(
        self, request: TextRequest, sequences: Sequence[Encoding], reduced: Sequence[Any]
    ) -> list[Tensor]:
        return answers.tensors(reduced, self.outputs)


class TextEmbedding:
    """``feature-extraction``: a vector for each text."""

    inputs = (TEXT,)
    options = ("normalize", "dimensions", TRUNCATE)
    NAME = "embedding"

    def __init__(self, tokenizer: TextTokenizer, settings: TextSettings, size: int) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._pooled = bool(settings.pooled)
        self._size = size
        self.reads = (settings.pooled or "last_hidden_state",)
        self.outputs = (TensorSpec(self.NAME, Datatype.FP32, (size,)),)

    def encode(self, request: TextRequest) -> list[Encoding]:
        truncate = truncates(self._settings, request.flag(TRUNCATE))
        return self._tokenizer.encode(request.strings[TEXT.name], truncate)

    def reduce(self, request: TextRequest, sequence: Encoding, outputs: Outputs) -> Array:
        found = outputs[self.reads[0]].astype(np.float32)
        return found if self._pooled else found.mean(axis=0)

    def answer(
        self, request: TextRequest, sequences: Sequence[Encoding], reduced: Sequence[Array]
    ) -> list[Tensor]:
        found = np.stack(reduced)
        size = request.count("dimensions", self._size, self._size)
        normalize = request.flag("normalize")
        if normalize or (size < self._size and normalize is None):
            found = found[:, :size]
            found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return [Tensor(self.NAME, Datatype.FP32, found[:, :size])]


TaskMaker = Callable[[TextTokenizer, TextSettings], TextPipeline]
