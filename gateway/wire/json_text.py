"""JSON with limits, and with Triton's bare tokens NaN, Infinity and -Infinity.

orjson parses and writes it. Texts with those tokens, which orjson rejects, go to the standard
library; Triton reads and writes them too (rapidjson's ``kParseNanAndInfFlag``).
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import orjson

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import offload
from modelport.gateway.types import Array
from modelport.gateway.wire import incremental_json
from modelport.gateway.wire.json_window import without_escapes
from modelport.gateway.wire.long_array import LongArray
from modelport.gateway.wire.raw_tensors import Buffer

MAX_DEPTH = 100
#: Valid requests have a dozen keys; more are refused before the objects are built.
MAX_KEYS = 10_000
#: Arrays and objects; an empty one takes thirty times the memory of its two bytes of text.
MAX_CONTAINERS = 4_000_000
#: From this many containers on, the garbage collector is off during parsing: its runs would visit
#: every container built so far, and take four fifths of the time.
_MANY = 10_000
_FIRST_BYTES, _CHUNK_BYTES = 1 << 10, 1 << 16
_STRUCTURE = b'"[]{}:'
_FILLING = bytes(set(range(256)) - set(_STRUCTURE))
_QUOTE, _COLON = b'":'
_TOKENS = re.compile(rb"NaN|Infinity")
_TOKEN = {"nan": b"NaN", "inf": b"Infinity", "-inf": b"-Infinity"}


class NonFinite:
    """The process's form of NaN and the infinities in answers: bare tokens, or null."""

    null = False


def loads(text: Buffer, max_keys: int = MAX_KEYS) -> Any:
    """Parse ``text``; long arrays of a long text become a ``LongArray``.

    Raises:
        InvalidArgument: ``text`` is not JSON, is nested deeper than ``MAX_DEPTH``, or has more than
            ``max_keys`` keys or ``MAX_CONTAINERS`` arrays and objects.
    """
    text = bytes(text)
    if len(text) > incremental_json.LONG_BYTES:
        limits = incremental_json.JsonLimits(MAX_DEPTH, max_keys, MAX_CONTAINERS)
        return incremental_json.loads(text, limits, partial(_uncollected, _parse))
    containers = text.count(b"[") + text.count(b"{")
    if containers > MAX_DEPTH or text.count(b":") > max_keys:
        _check_size(text, max_keys)
    return _parse(text) if containers <= _MANY else _uncollected(_parse, text)


def discard(document: Any, size: int) -> None:
    """Empty a ``document`` of ``size`` bytes, if to free it at once would take long."""
    if size > incremental_json.LONG_BYTES:
        incremental_json.discard(document)


def is_array(value: Any) -> bool:
    return type(value) is list or type(value) is LongArray


def _parse(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if _TOKENS.search(text):
            try:
                value = _uncollected(json.loads, text.decode())
                orjson.dumps(value)  # rejects lone surrogates, as orjson.loads does
                return value
            except (ValueError, TypeError, RecursionError):
                pass
        raise InvalidArgument(f"failed to parse the request JSON buffer: {error}") from error


def _uncollected(load: Callable[[Any], Any], text: bytes | str) -> Any:
    if not gc.isenabled():  # another thread has disabled it
        return load(text)
    gc.disable()
    try:
        return load(text)
    finally:
        gc.enable()


def count_keys(text: bytes) -> int:
    """Count the keys of a text that ``loads`` has accepted, duplicates included."""
    return _check_size(text, len(text))


def _check_size(text: bytes, max_keys: int) -> int:
    """Enforce the limits in linear passes, and return the number of keys."""
    containers = keys = 0
    for letters, outside, steps, depths in _structure(text, _CHUNK_BYTES, _FILLING):
        if int(depths.max()) > MAX_DEPTH:
            raise InvalidArgument(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")
        keys += int(np.count_nonzero((letters == _COLON) & outside))
        if keys > max_keys:
            raise InvalidArgument(f"the request JSON has more than {max_keys} keys")
        containers += int(np.count_nonzero(steps > 0))
        if containers > MAX_CONTAINERS:
            raise InvalidArgument(
                f"the request JSON has more than {MAX_CONTAINERS} arrays and objects; send fewer "
                "elements, or tensors as bytes"
            )
    return keys


def end(text: bytes) -> int | None:
    """Find the end of the array or object at the start of ``text``, without parsing it."""
    start = 0
    # A short value may have a long text behind it.
    for letters, _, steps, depths in _structure(text, _FIRST_BYTES):
        ends = np.flatnonzero((depths <= 0) & (steps < 0))
        if len(ends):
            return start + int(ends[0]) + 1
        if int(depths.max()) > MAX_DEPTH:
            return None
        start += len(letters)
    return None


def _structure(
    text: bytes, size: int, dropped: bytes = b""
) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Split ``text`` as ``_pieces``; yield what is in each piece, without the bytes ``dropped``.

    That is the bytes, whether each is outside of strings, its change of the depth, and the depth.
    """
    depth = inside = 0
    for piece in _pieces(text, size):
        letters = np.frombuffer(piece.translate(None, dropped), np.uint8)
        if letters.size:
            quotes = np.cumsum(letters == _QUOTE, dtype=np.int32) + inside
            outside = (quotes & 1) == 0
            steps = np.where(outside, incremental_json.STEPS[letters], 0)
            depths = np.cumsum(steps, dtype=np.int32) + depth
            yield letters, outside, steps, depths
            depth, inside = int(depths[-1]), int(quotes[-1]) & 1


def _pieces(text: bytes, size: int) -> Iterator[bytes]:
    """Split ``text``, with escaped quotes and backslashes masked; the first has ``size`` bytes."""
    start = 0
    while start < len(text):
        piece = without_escapes(text[start : start + size])
        if piece.endswith(b"\\") and len(piece) > 1:  # the next piece begins with the escape
            piece = piece[:-1]
        yield piece
        start, size = start + len(piece), min(2 * size, _CHUNK_BYTES)
        offload.checkpoint()


#: Encode a value, which may hold numpy arrays. Floats must be finite (see ``dumps_any``).
dumps: Callable[[Any], bytes] = partial(orjson.dumps, option=orjson.OPT_SERIALIZE_NUMPY)


def dumps_any(value: Any) -> bytes:
    """Encode ``value`` with NaN and the infinities as bare tokens; arrays must be lists."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def number(value: float) -> float | None:
    """Prepare a single number for ``dumps_any``, as ``numbers``."""
    return None if NonFinite.null and not math.isfinite(value) else value


def numbers(array: Array) -> Any:
    """Prepare an array of numbers for ``dumps``, with NaN and the infinities as ``NonFinite``."""
    if array.dtype.kind == "f" and not NonFinite.null and not np.isfinite(array).all():
        # orjson writes null for each of them, and for no other number.
        parts = dumps(np.atleast_1d(array)).split(b"null")
        wanted = [_TOKEN[str(value)] for value in array[~np.isfinite(array)].tolist()]
        text = b"".join(itertools.chain(*zip(parts, wanted, strict=False), parts[-1:]))
        return orjson.Fragment(text if array.ndim else text[1:-1])
    if not array.ndim:
        value = array[()]  # orjson supports only some of numpy's integer types
        return int(value) if array.dtype.kind in "iu" else value
    return array if array.flags.c_contiguous else array.copy()
