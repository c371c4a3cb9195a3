"""Incremental parser of long JSON; long arrays become ``LongArray``.

orjson holds the interpreter lock while it parses, and its lists take ten times the memory of the
text. So the text is cut at commas. A piece such as ``3],[4`` of ``{"data":[[1,2,3],[4]]}`` gets the
brackets that are open at its start and at its end, ``{"":[[3],[4]]}``, and its value continues
those of the pieces before it. A long string is decoded in slices, and the piece has a mark in its
place. Depth, keys and containers are limited on the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import offload, request_memory
from modelport.gateway.wire import json_window
from modelport.gateway.wire.json_window import MARK, JsonWindow, without_escapes
from modelport.gateway.wire.long_array import LongArray

#: Length from which a text is cut, and of a piece; strings may make a piece longer.
LONG_BYTES = 256 * 1024
PIECE_BYTES = 64 * 1024
#: Limit of a number, and of other text without a comma, a string or a space.
MAX_TOKEN_BYTES = 256 * 1024
#: Arrays of up to this many values become lists.
SMALL = 4096
#: Size of a small object in memory. The objects of a text may take some times its size.
OBJECT_BYTES = 208
OBJECTS_FREE_BYTES, OBJECTS_RATIO = 16 << 20, 6
#: Limit of the elements of other lists: of objects, of rows of different lengths, of mixed types.
MAX_PLAIN = 500_000
#: Key of a member that continues.
_CONTINUED = b'"%b":' % MARK.encode()
_QUOTE, _COMMA, _COLON, _OBJECT = b'",:{'
_SPACE = b" \t\r\n"
_CLOSING = {ord("["): b"]", ord("{"): b"}"}
#: By character: the change of the depth.
STEPS = np.zeros(256, np.int8)
STEPS[list(b"[{")] = 1
STEPS[list(b"]}")] = -1


class JsonLimits(NamedTuple):
    """JsonLimits of a document; ``keys`` also limits the number of objects, as its size does."""

    depth: int
    keys: int
    containers: int


class _Open(NamedTuple):
    """An array or object that is open: its bracket, and its key if it is a member."""

    bracket: int
    key: str | None


class _Cut(NamedTuple):
    """A piece with the places of its long strings by their marks.

    ``spine`` lists the levels open at its ``end``; the first ``kept`` were open at its start.
    """

    piece: bytes
    strings: Mapping[str, tuple[int, int]]
    end: int
    spine: list[_Open]
    kept: int


class _Array:
    """A partially read array."""

    def __init__(self) -> None:
        self._long = LongArray()
        self._plain: list[Any] | None = None

    def add(self, items: list[Any]) -> None:
        if not items:
            return
        if self._plain is None:
            if self._long.add(items):
                return
            if len(self._long.shape) > 1 and len(self._long) > SMALL:
                raise InvalidArgument("the rows of an array have different lengths or types")
            self._check_size(len(self._long) + len(items))
            self._plain, self._long = self._long.tolist(), LongArray()
        self._check_size(len(self._plain) + len(items))
        self._plain += items

    def _check_size(self, size: int) -> None:
        if size > MAX_PLAIN:
            raise InvalidArgument(
                f"an array of more than {MAX_PLAIN} elements must hold only numbers, only strings, "
                "only booleans or rows of one shape"
            )

    def close(self, _: str | None, value: Any) -> None:
        """Add the element that was open."""
        self.add([value])

    def value(self) -> Any:
        if self._plain is not None:
            return self._plain
        few = max(len(self._long), self._long.size) <= SMALL
        return self._long.tolist() if few else self._long


class _Object:
    """A partially read object."""

    def __init__(self) -> None:
        self._members: dict[str, Any] = {}

    def add(self, members: dict[str, Any]) -> None:
        self._members.update(members)

    def close(self, key: str | None, value: Any) -> None:
        """Add the member that was open."""
        assert key is not None
        self._members[key] = value

    def value(self) -> Any:
        return self._members


class _OpenContainers:
    """The containers that are open, outermost first."""

    def __init__(self) -> None:
        self._spine: list[_Open] = []
        self._nodes: list[_Array | _Object] = []

    def take(self, value: Any, cut: _Cut) -> Any:
        """Add the value of a piece; return the document once it is complete."""
        rests = self._rests(value)
        kept, whole = cut.kept, None
        for level in reversed(range(kept, len(self._nodes))):
            node = self._nodes[level]
            node.add(rests[level])
            if level:
                self._nodes[level - 1].close(self._spine[level].key, node.value())
            else:
                whole = node.value()
        del self._nodes[kept:]
        self._spine = cut.spine
        rest: Any = rests[kept - 1] if kept else [value]
        for level in range(kept, len(cut.spine)):
            opened = cut.spine[level]
            # The element that is still open is added when it is complete.
            child = rest.pop() if opened.key is None else rest.pop(opened.key)
            if level:
                self._nodes[level - 1].add(rest)
            self._nodes.append(_Object() if opened.bracket == _OBJECT else _Array())
            rest = child
        if self._nodes:
            self._nodes[-1].add(rest)
        return whole

    def discard(self) -> None:
        """Free what was read."""
        for node in self._nodes:
            discard(node.value())

    def _rests(self, value: Any) -> list[Any]:
        """Split the value of a piece into the new elements of each open level."""
        rests = []
        for level in range(len(self._nodes)):
            rests.append(value)
            if level + 1 < len(self._nodes):
                if type(value) is list:
                    rests[level], value = value[1:], value[0]
                else:
                    value = value.pop(MARK)
        return rests


def loads(text: bytes, limits: JsonLimits, parse: Callable[[bytes], Any]) -> Any:
    """Parse ``text``, with ``parse`` for each piece.

    Raises:
        InvalidArgument: ``text`` is not JSON, or exceeds ``limits``.
    """
    reader, scanner = _OpenContainers(), _Scanner(text, limits)
    spine: list[_Open] = []
    start, value = 0, None
    try:
        while start <= len(text):
            cut = scanner.cut(start, spine)
            closing = (_CLOSING[opened.bracket] for opened in reversed(cut.spine))
            piece = b"".join((_opening(spine), cut.piece, *closing))
            if start == 0 and not cut.spine:
                return _value(text, piece, cut, parse)
            value = reader.take(_value(text, piece, cut, parse), cut)
            start, spine = cut.end + 1, cut.spine
            offload.checkpoint()
    except BaseException:
        reader.discard()
        raise
    return value


def discard(value: Any) -> None:
    """Empty lists and dictionaries in pieces.

    Python frees half a million objects at once, and holds the interpreter lock meanwhile.
    """
    if type(value) is dict:
        for member in value.values():
            discard(member)
    elif type(value) is list:
        while len(value) > SMALL:
            del value[-SMALL:]
        for item in value:
            discard(item)


def _value(text: bytes, piece: bytes, cut: _Cut, parse: Callable[[bytes], Any]) -> Any:
    """Parse a piece and the long strings of ``text`` in it."""
    value = parse(piece)
    if not cut.strings:
        return value
    places = cut.strings.items()
    strings = {mark: json_window.string(text, *place, parse) for mark, place in places}
    return _with_strings(value, strings)


def _with_strings(value: Any, strings: Mapping[str, str]) -> Any:
    """Replace the marks of ``strings`` in the value of a piece."""
    if type(value) is str:
        return strings.get(value, value)
    if type(value) is list:
        return [_with_strings(item, strings) for item in value]
    if type(value) is dict:
        if not strings.keys().isdisjoint(value):
            raise InvalidArgument("a key of the request JSON is too long")
        return {key: _with_strings(member, strings) for key, member in value.items()}
    return value


def _opening(spine: list[_Open]) -> bytes:
    parts = []
    for level, opened in enumerate(spine):
        parts.append(b"{" if opened.bracket == _OBJECT else b"[")
        if opened.bracket == _OBJECT and level + 1 < len(spine):
            parts.append(_CONTINUED)
    return b"".join(parts)


class _Scanner:
    """Finds the commas at which to cut, and enforces the limits."""

    def __init__(self, text: bytes, limits: JsonLimits) -> None:
        self._text, self._limits = text, limits
        fair = (OBJECTS_FREE_BYTES + OBJECTS_RATIO * len(text)) // OBJECT_BYTES
        self._most_objects = min(limits.keys, fair)
        self._keys = self._objects = self._containers = 0

    def cut(self, start: int, spine: list[_Open]) -> _Cut:
        """Find the end of the piece that begins at ``start``, where ``spine`` is open."""
        window = JsonWindow(start)
        while True:
            window.text += self._text[window.end : window.end + PIECE_BYTES]
            window.end = min(window.end + PIECE_BYTES, len(self._text))
            found = self._try(window, spine, window.end == len(self._text))
            if found is not None:
                return found
            self._pass_over(window)

    def _pass_over(self, window: JsonWindow) -> None:
        """Leave out the string or the white space at the end of ``window``, which has no comma."""
        clean = without_escapes(window.text)
        space = len(clean) - len(clean.rstrip(_SPACE))
        if clean.count(b'"') % 2:
            quote = clean.rfind(b'"')
            window.cut_out(quote + 1, self._string_end(window.place(quote) + 1), True)
        elif space:
            window.cut_out(len(clean) - space, window.end, False)
        elif len(clean) > MAX_TOKEN_BYTES:
            raise InvalidArgument("failed to parse the request JSON buffer: no comma is found")

    def _string_end(self, place: int) -> int:
        """Find the closing quote of the string that contains ``place``."""
        while place < len(self._text):
            part = without_escapes(self._text[place : place + PIECE_BYTES])
            quote = part.find(b'"')
            if quote >= 0:
                return place + quote
            # The last backslash of an odd run escapes the next character.
            place += len(part) + part.endswith(b"\\")
            offload.checkpoint()
        return len(self._text)

    def _try(self, window: JsonWindow, spine: list[_Open], last: bool) -> _Cut | None:
        piece = without_escapes(window.text)
        letters = np.frombuffer(piece, np.uint8)
        outside = (np.cumsum(letters == _QUOTE, dtype=np.int32) & 1) == 0
        steps = np.where(outside, STEPS[letters], 0)
        depths = np.cumsum(steps, dtype=np.int32) + len(spine)
        end = len(piece)
        if not last:
            commas = np.flatnonzero((letters == _COMMA) & outside)
            if not len(commas):
                return None
            later = commas[commas >= len(piece) // 2]
            commas = later if len(later) else commas[-1:]
            at = depths[commas]
            end = int(commas[at == at.min()][-1])
        steps, depths, letters = steps[:end], depths[:end], letters[:end]
        self._bound(letters, outside[:end], steps, depths)
        if window.start and piece[:end].lstrip(_SPACE)[:1] in (b"", b"]", b"}"):
            raise _unexpected(piece[:end].lstrip(_SPACE)[:1], window.start)
        if last:
            return _Cut(*window.piece(end), window.place(end), [], 0)
        depth = int(depths[-1]) if end else len(spine)
        kept = min(len(spine), int(depths.min())) if end else depth
        before = piece[:end].rstrip(_SPACE)[-1:]
        if depth < 1 or (kept < 1 and window.start) or before in (b"", b"[", b"{"):
            raise _unexpected(b",", window.place(end))
        opened = spine[:kept]
        openings = np.flatnonzero(steps > 0)
        for level in range(kept, depth):
            place = int(openings[depths[openings] == level + 1][-1])
            is_member = bool(opened) and opened[-1].bracket == _OBJECT
            opened.append(_Open(piece[place], _key(window, piece, place) if is_member else None))
        return _Cut(*window.piece(end), window.place(end), opened, kept)

    def _bound(self, letters: Any, outside: Any, steps: Any, depths: Any) -> None:
        limits = self._limits
        if len(depths) and int(depths.max()) > limits.depth:
            raise InvalidArgument(f"the request JSON is nested deeper than {limits.depth} levels")
        self._keys += int(np.count_nonzero((letters == _COLON) & outside))
        if self._keys > limits.keys:
            raise InvalidArgument(f"the request JSON has more than {limits.keys} keys")
        objects = int(np.count_nonzero((letters == _OBJECT) & outside))
        self._objects += objects
        if self._objects > self._most_objects:
            raise InvalidArgument(
                f"the request JSON has more than {self._most_objects} objects; instead of "
                "rows, send columns (arrays of values by name)"
            )
        request_memory.reserve(objects * OBJECT_BYTES)
        self._containers += int(np.count_nonzero(steps > 0))
        if self._containers > limits.containers:
            raise InvalidArgument(
                f"the request JSON has more than {limits.containers} arrays and objects; send "
                "fewer elements, or tensors as bytes"
            )


def _key(window: JsonWindow, piece: bytes, place: int) -> str:
    """Read the key of the member whose value begins at ``place``."""
    head = piece[:place].rstrip(_SPACE)
    end = head[:-1].rstrip(_SPACE).rfind(b'"') if head.endswith(b":") else -1
    begin = piece.rfind(b'"', 0, max(0, end))
    if begin >= 0 and all(gap.offset != begin + 1 for gap in window.gaps):
        with contextlib.suppress(orjson.JSONDecodeError):
            return str(orjson.loads(window.text[begin : end + 1]))
    raise InvalidArgument(
        "failed to parse the request JSON buffer: a member of an object has no key, or a long one"
    )


def _unexpected(found: bytes, place: int) -> InvalidArgument:
    what = f"unexpected '{found.decode()}'" if found else "unexpected end"
    return InvalidArgument(f"failed to parse the request JSON buffer: {what} at {place}")
