"""JSON as Triton speaks it: bounded depth, and the bare tokens NaN, Infinity and -Infinity.

orjson does the work. What it refuses for those tokens alone goes to the standard library, which
reads and writes them; Triton does both (rapidjson's ``kParseNanAndInfFlag``).
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import orjson

from gateway.errors import InvalidArgument
from gateway.protocols.raw import Buffer

MAX_DEPTH = 100
#: Objects this API knows have a dozen keys; a flood of keys is refused before it is built.
MAX_KEYS = 10_000
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_TOKENS = re.compile(rb"NaN|Infinity")
_DEPTH_STEP = np.zeros(256, np.int8)
_DEPTH_STEP[list(b"[{")] = 1
_DEPTH_STEP[list(b"]}")] = -1


def loads(text: Buffer) -> Any:
    """The value of ``text``.

    Raises:
        InvalidArgument: not JSON, nested deeper than ``MAX_DEPTH``, or more than ``MAX_KEYS`` keys.
    """
    text = bytes(text)
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH or text.count(b":") > MAX_KEYS:
        _check_size(text)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if _TOKENS.search(text):
            try:
                return json.loads(text)
            except ValueError:
                pass
        raise InvalidArgument(f"failed to parse the request JSON buffer: {error}") from error


def _check_size(text: bytes) -> None:
    if _depth(text) > MAX_DEPTH or text.count(b":") > MAX_KEYS:
        bare = _STRINGS.sub(b"", text)  # brackets and colons inside strings do not count
        if _depth(bare) > MAX_DEPTH:
            raise InvalidArgument(f"the request JSON is nested deeper than {MAX_DEPTH} levels")
        if bare.count(b":") > MAX_KEYS:
            raise InvalidArgument(f"the request JSON has more than {MAX_KEYS} keys")


def _depth(text: bytes) -> int:
    steps = _DEPTH_STEP[np.frombuffer(text, np.uint8)]
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def dumps(value: Any) -> bytes:
    """``value`` as JSON; numpy arrays as lists. Floats in it must be finite (see ``dumps_any``)."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def dumps_any(value: Any) -> bytes:
    """``value`` as JSON with NaN and the infinities as bare tokens; arrays must be lists."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
