"""Windows of a JSON text, without the content of long strings, which are decoded in slices.

orjson would hold the interpreter lock while it parses a long string.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import offload

SLICE_BYTES = 64 * 1024
#: Begins the marks in place of strings. It is random, so that no request contains it.
MARK = os.urandom(16).hex()
#: An escape sequence that a slice would cut, with the first half of its surrogate pair.
_CUT_ESCAPE = re.compile(rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")
_LONGEST_ESCAPE = len(r"\ud83d\ude00")


class JsonGap(NamedTuple):
    """A part of the text that a window leaves out: a string's content, or white space."""

    #: Its place in the window.
    offset: int
    start: int
    end: int
    is_string: bool


class JsonWindow:
    """The text from ``start`` to ``end`` without the contents of long strings and long white space.

    ``gaps`` are the parts that are left out.
    """

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.text = b""
        self.gaps: list[JsonGap] = []

    def place(self, offset: int) -> int:
        """Convert an offset in the window to one in the whole text."""
        gaps = sum(gap.end - gap.start for gap in self.gaps if gap.offset <= offset)
        return self.start + offset + gaps

    def cut_out(self, offset: int, end: int, is_string: bool) -> None:
        """Leave out the text from ``offset`` to ``end``, an offset in the whole text."""
        self.gaps.append(JsonGap(offset, self.place(offset), end, is_string))
        self.text, self.end = self.text[:offset], end

    def piece(self, end: int) -> tuple[bytes, Mapping[str, tuple[int, int]]]:
        """Return the text up to the offset ``end`` with marks, and the strings' places by mark."""
        if not self.gaps:
            return self.text[:end], {}
        parts: list[bytes] = []
        strings: dict[str, tuple[int, int]] = {}
        at = 0
        for gap in self.gaps:
            mark = f"{MARK}{len(strings)}" if gap.is_string else " "
            if gap.is_string:
                strings[mark] = gap.start, gap.end
            parts += [self.text[at : gap.offset], mark.encode()]
            at = gap.offset
        return b"".join((*parts, self.text[at:end])), strings


def string(text: bytes, start: int, end: int, parse: Callable[[bytes], Any]) -> str:
    """Decode ``text[start:end]``, the content of a string, with ``parse`` for each slice.

    Raises:
        InvalidArgument: It is not the content of one JSON string.
    """
    parts: list[str] = []
    while start < end:
        stop = (
            _stop(text, start, min(start + SLICE_BYTES, end)) if end - start > SLICE_BYTES else end
        )
        part = parse(b'"%b"' % text[start:stop])
        if type(part) is not str:
            raise InvalidArgument("failed to parse the request JSON buffer: a string is truncated")
        parts.append(part)
        start = stop
        offload.checkpoint()
    return "".join(parts)


def _stop(text: bytes, start: int, stop: int) -> int:
    """Move ``stop`` back, so that no character and no escape sequence is cut."""
    begin = max(start, stop - 2 * _LONGEST_ESCAPE)
    if begin > start:  # behind any character but a backslash no quote or backslash is escaped
        before = text[begin : stop - _LONGEST_ESCAPE].rstrip(b"\\")
        begin = begin + len(before) if before else start
    content = without_escapes(text[begin:stop])
    cut = _CUT_ESCAPE.search(content, len(content) - _LONGEST_ESCAPE)
    assert cut is not None  # it matches the end
    if cut.start() < len(content):
        return begin + cut.start()
    for back in range(4):  # bytes of the longest character
        if text[stop - back] & 0xC0 != 0x80:
            return stop - back
    return stop


def without_escapes(text: bytes) -> bytes:
    """Mask escaped quotes and backslashes, without changing the length."""
    if b"\\" in text:  # pairs first: the last backslash of an odd run escapes a quote
        return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    return text
