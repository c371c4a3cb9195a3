"""``question-answering``: the span of a context that answers a question.

A long context is read in windows that overlap. A span's score is the probability of its first token
times that of its last, each among the tokens of its window. Spans of the same words add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.text import answers
from modelport.gateway.inference.text.tasks import MAX_TOP_K, TOP_K, Outputs, item_specs
from modelport.gateway.inference.text.text_request import TextRequest
from modelport.gateway.inference.text.tokenizing import MAX_SEQUENCES, TextTokenizer
from modelport.gateway.repository.text_settings import TextSettings
from modelport.gateway.runtime import offload
from modelport.gateway.types import Array, Datatype, Tensor, TensorSpec

if TYPE_CHECKING:
    from tokenizers import Encoding

QUESTION = TensorSpec("question", Datatype.BYTES, ())
CONTEXT = TensorSpec("context", Datatype.BYTES, ())
#: Tokens of a window, that windows share, and of an answer.
MAX_WINDOW, MAX_STRIDE, MAX_ANSWER = 384, 128, 15
_ALIGN, _IMPOSSIBLE = "align_to_words", "handle_impossible_answer"


class _Span(NamedTuple):
    """A possible answer: its place in the context, and its score."""

    start: int
    end: int
    score: float


class QuestionAnswering:
    """Answers questions from a context."""

    inputs = (QUESTION, CONTEXT)
    outputs = item_specs(
        score=Datatype.FP32, start=Datatype.INT64, end=Datatype.INT64, answer=Datatype.BYTES
    )
    options = (TOP_K, "doc_stride", "max_answer_len", "max_seq_len", _ALIGN, _IMPOSSIBLE)
    reads = ("start_logits", "end_logits")

    def __init__(self, tokenizer: TextTokenizer, settings: TextSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings

    def encode(self, request: TextRequest) -> list[Encoding]:
        questions, contexts = request.strings[QUESTION.name], request.strings[CONTEXT.name]
        if len(questions) != len(contexts):
            raise InvalidArgument(
                f"there are {len(questions)} questions for {len(contexts)} contexts; send one for "
                "each"
            )
        longest = min(MAX_WINDOW, self._settings.max_tokens)
        most = request.count("max_seq_len", longest, self._settings.max_tokens)
        stride = request.count("doc_stride", max(1, min(most // 2, MAX_STRIDE)), most)
        found: list[Encoding] = []
        for number, (question, context) in enumerate(zip(questions, contexts, strict=True)):
            if not context.strip() or not question.strip():
                raise InvalidArgument(f"question {number + 1} or its context is empty")
            offload.checkpoint()
            found += self._tokenizer.windows(question, context, most, stride)
            if len(found) > MAX_SEQUENCES:
                raise InvalidArgument(
                    f"the contexts have more than {MAX_SEQUENCES} windows; send fewer"
                )
        return found

    def reduce(
        self, request: TextRequest, sequence: Encoding, outputs: Outputs
    ) -> tuple[list[_Span], float]:
        """The likeliest spans of a window, and the score of no answer."""
        top = request.count(TOP_K, 1, MAX_TOP_K)
        align = request.flag(_ALIGN) is not False
        longest = request.count("max_answer_len", MAX_ANSWER, self._settings.max_tokens)
        side = 0 if self._settings.pad_left else 1
        allowed = np.array([each == side for each in sequence.sequence_ids])
        if self._settings.cls is not None:
            allowed |= np.array(sequence.ids) == self._settings.cls
        starts, ends = (
            answers.softmax(np.where(allowed, outputs[name].astype(np.float32), -10000.0))
            for name in self.reads
        )
        impossible = float(starts[0] * ends[0])
        starts[0] = ends[0] = 0
        kept = top * 2 + 10 if align else top
        spans = _best(starts, ends, min(longest, len(starts)), kept)
        found = []
        for first, last, score in spans:
            if allowed[first] and allowed[last]:
                place = _place(sequence, first, last, side, align)
                found.append(_Span(*place, score))
        return found, impossible

    def answer(
        self,
        request: TextRequest,
        sequences: Sequence[Encoding],
        reduced: Sequence[tuple[list[_Span], float]],
    ) -> list[Tensor]:
        top = request.count(TOP_K, 1, MAX_TOP_K)
        rows = []
        for context, windows in zip(
            request.strings[CONTEXT.name], _by_text(sequences, reduced), strict=True
        ):
            found: dict[str, dict[str, Any]] = {}
            for spans, _ in windows:
                for start, end, score in spans:
                    text = context[start:end]
                    known = found.setdefault(
                        text.lower(), {"score": 0.0, "start": start, "end": end, "answer": text}
                    )
                    known["score"] += score
            every = list(found.values())
            if request.flag(_IMPOSSIBLE):
                least = min(score for _, score in windows)
                every.append({"score": least, "start": 0, "end": 0, "answer": ""})
            rows.append(sorted(every, key=lambda item: -item["score"])[:top])
        return answers.tensors(rows, self.outputs)


def _best(starts: Array, ends: Array, longest: int, count: int) -> Iterator[tuple[int, int, float]]:
    """The ``count`` likeliest spans of at most ``longest`` tokens."""
    following = np.concatenate([ends, np.zeros(longest - 1, ends.dtype)])
    spans = np.lib.stride_tricks.sliding_window_view(following, longest) * starts[:, None]
    flat = spans.reshape(-1)
    count = min(count, flat.size)
    order = np.argpartition(-flat, count - 1)[:count]
    for place in order[np.argsort(-flat[order], kind="stable")].tolist():
        first, more = divmod(place, longest)
        if first + more < len(starts):
            yield first, first + more, float(flat[place])


def _place(sequence: Encoding, first: int, last: int, side: int, align: bool) -> tuple[int, int]:
    """Find the place of a span in the context; ``align`` widens it to whole words."""
    if align:
        begin, end = sequence.token_to_word(first), sequence.token_to_word(last)
        if begin is not None and end is not None:
            starts, ends = sequence.word_to_chars(begin, side), sequence.word_to_chars(end, side)
            if starts is not None and ends is not None:
                return starts[0], ends[1]
    offsets = sequence.offsets
    return offsets[first][0], offsets[last][1]


def _by_text(
    sequences: Sequence[Encoding], reduced: Sequence[tuple[list[_Span], float]]
) -> list[list[tuple[list[_Span], float]]]:
    """Group the results of windows by text; a text's first window has the others as overflow."""
    found, start = [], 0
    while start < len(sequences):
        end = start + 1 + len(sequences[start].overflowing)
        found.append(list(reduced[start:end]))
        start = end
    return found
