"""Texts to token ids by Hugging Face ``tokenizers``, within limits.

A text is limited in bytes before it is tokenized, and in tokens afterwards. ``encode_batch``
releases the interpreter lock, so a large request is tokenized in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from modelport.gateway.errors import IntegrityError, InvalidArgument
from modelport.gateway.extras import missing_extra
from modelport.gateway.repository.text_settings import TOKENIZER, LongTexts, TextSettings
from modelport.gateway.runtime import offload
from modelport.gateway.types import Array

if TYPE_CHECKING:
    from tokenizers import Encoding

#: A text, or two texts that belong together.
Text = str | tuple[str, str]
#: The longest text. 256 KiB of words take a fifth of a second.
MAX_TEXT_BYTES = 256 * 1024
#: A text with more characters for each token that it may have is likely too long.
TOKEN_CHARACTERS = 32
#: Of the sequences that a request becomes: texts, candidate labels for each, windows.
MAX_SEQUENCES = 8192
#: ``transformers`` removes these spaces from decoded text.
_SPACES = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class TextTokenizer:
    """The tokenizer of a version.

    Raises:
        Unsupported: ``tokenizers`` is not installed.
        IntegrityError: ``content`` is no tokenizer.
    """

    def __init__(self, content: str, settings: TextSettings) -> None:
        # Threads of the library would compete with those of the model, and survive no fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise missing_extra(error) from error
        try:
            self._tokenizer = Tokenizer.from_str(content)
        except BaseException as error:  # a panic of Rust is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = " ".join(str(error).split())[:200]
            raise IntegrityError(f"{TOKENIZER} is not a tokenizer: {reason}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._settings = settings
        self._special = [self._tokenizer.num_special_tokens_to_add(pair) for pair in (False, True)]
        self.has_words = bool(getattr(self._tokenizer.model, "continuing_subword_prefix", None))

    def encode(
        self, texts: Sequence[Text], truncate: bool, first_only: bool = False, offsets: bool = False
    ) -> list[Encoding]:
        """Tokenize ``texts``, in pieces.

        Args:
            truncate: cut what is too long, instead of refusing it.
            first_only: cut only the first text of a pair.
            offsets: keep where in the text a token lies.

        Raises:
            InvalidArgument: a text is too long.
        """
        batch = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        begins = [self._begin(text) for text in texts]
        most = self._settings.max_tokens
        found: list[Encoding] = []
        for piece in _pieces(begins):
            offload.checkpoint()
            for begin, encoding in zip(piece, batch(piece), strict=True):
                text = texts[len(found)]
                if begin is not text and len(encoding) <= most:  # of very long words
                    offload.checkpoint()
                    begin, (encoding,) = text, batch([text])
                if len(encoding) > most:
                    if not truncate:
                        more = "" if begin is text else "more than "
                        raise InvalidArgument(
                            f"text {len(found) + 1} has {more}{len(encoding)} tokens, at most "
                            f"{most} are taken; shorten it, or send the parameter truncate=true"
                        )
                    encoding = self._truncated(begin, first_only)
                found.append(encoding)
        return found

    def _begin(self, text: Text) -> Text:
        """The words at the start of a text that may be too long: no more has to be tokenized."""
        if isinstance(text, tuple):
            found = (self._first_words(text[0]), self._first_words(text[1]))
            return text if found == text else found
        return self._first_words(text)

    def _first_words(self, text: str) -> str:
        most = self._settings.max_tokens * TOKEN_CHARACTERS
        if len(text) <= most or self._settings.truncate_left:
            return text
        end = text.rfind(" ", 0, most)
        return text[:end] if end > 0 else text

    def windows(self, question: str, context: str, most: int, stride: int) -> list[Encoding]:
        """Tokenize a question with each window of its context; windows overlap by ``stride``.

        Raises:
            InvalidArgument: the question leaves no room for the context.
        """
        left = self._settings.pad_left  # the context is first, where its padding is
        first, second = self._parts((context, question) if left else (question, context))
        asked, read = (second, first) if left else (first, second)
        room = most - len(asked) - self._special[True]
        if room <= stride:
            raise InvalidArgument(
                f"a question of {len(asked)} tokens leaves {max(0, room)} of {most} tokens for the "
                "context; shorten it"
            )
        read.truncate(room, stride=stride)
        encoding = self._tokenizer.post_process(first, second, True)
        return [encoding, *encoding.overflowing]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """The text of token ids."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special)
        if self._settings.clean:
            for spaced in _SPACES:
                text = text.replace(spaced, "'" if spaced == " ' " else spaced[1:])
        return text

    def joined(self, tokens: Sequence[str]) -> str:
        """The text of tokens."""
        decoder = self._tokenizer.decoder
        text: str = " ".join(tokens) if decoder is None else decoder.decode(tokens)
        return text

    def _parts(self, text: Text) -> list[Encoding]:
        """A text or both of a pair, without special tokens."""
        first, *others = (text,) if isinstance(text, str) else text
        # A second text has the type of one, in the windows that it overflows to as well.
        parts = [first, *(("", other) for other in others)]
        found: list[Encoding] = self._tokenizer.encode_batch(parts, add_special_tokens=False)
        return found

    def _truncated(self, text: Text, first_only: bool) -> Encoding:
        """Cut the longer text of a pair first, as ``longest_first`` does."""
        side = "left" if self._settings.truncate_left else "right"
        first, *others = self._parts(text)
        room = self._settings.max_tokens - self._special[bool(others)]
        if not others:
            first.truncate(max(0, room), direction=side)
            return self._tokenizer.post_process(first, None, True)
        (second,) = others
        one, other = _shares(len(first), len(second), room, first_only)
        first.truncate(one, direction=side)
        second.truncate(other, direction=side)
        return self._tokenizer.post_process(first, second, True)


def truncates(settings: TextSettings, asked: bool | None) -> bool:
    """Whether long texts are cut: as the request asks, else as the version declares."""
    return settings.long_texts is LongTexts.TRUNCATE if asked is None else asked


def padded(encodings: Sequence[Encoding], settings: TextSettings, width: int) -> dict[str, Array]:
    """The model's inputs for sequences, by name, padded to ``width`` tokens."""
    shape = (len(encodings), width)
    ids = np.full(shape, settings.pad or 0, np.int64)
    types = np.full(shape, settings.pad_type, np.int64)
    mask = np.zeros(shape, np.int64)
    for row, encoding in enumerate(encodings):
        size = len(encoding)
        span = slice(width - size, width) if settings.pad_left else slice(size)
        ids[row, span], types[row, span], mask[row, span] = encoding.ids, encoding.type_ids, 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def _pieces(texts: Sequence[Text]) -> list[Sequence[Text]]:
    """Parts of ``texts`` that each take some milliseconds."""
    parts, start, size = [], 0, 0
    for index, text in enumerate(texts):
        size += sum(map(len, text)) if isinstance(text, tuple) else len(text)
        if size >= offload.PIECE_BYTES:
            parts.append(texts[start : index + 1])
            start, size = index + 1, 0
    return [*parts, texts[start:]] if start < len(texts) else parts


def _shares(first: int, second: int, room: int, first_only: bool) -> tuple[int, int]:
    """The tokens to keep of both texts of a pair, together at most ``room``.

    Raises:
        InvalidArgument: the second one leaves no room.
    """
    if first_only or room < 2:
        if room <= second:
            raise InvalidArgument(
                f"the second text has {second} tokens, which leave no room for the first; shorten "
                "it"
            )
        return room - second, second
    short, long = sorted((first, second))
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (short, long) if first <= second else (long, short)
