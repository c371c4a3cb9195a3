"""Strict validation of the header of a ``.safetensors`` file.

Every reader of a valid file finds the same tensors in it.

Layout: 8 bytes with the header's length; the header,
JSON {"name": {"dtype", "shape", "data_offsets"}}; then the values of all tensors.

The header is read member by member: a JSON parser would make objects of 64 bytes from every ``{}``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from modelport.gateway.errors import IntegrityError

MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
#: Several times what the largest models have in a file. Each costs PyTorch 15 microseconds.
MOST_MEMBERS = 1 << 17

_SIGN = re.compile(r"[ \t\n\r]*([{}:,])[ \t\n\r]*")
#: The description of a tensor; its longest part is its shape.
_TENSOR = re.compile(r"\{[^{}]{1,2000}\}")


def check(path: Path) -> None:
    """Refuse a file with duplicate names, or with values that overlap or leave gaps.

    Raises:
        IntegrityError: the message names the problem.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size - 8 - length
            if not 0 < length <= MAX_HEADER_BYTES or size < 0:
                raise ValueError("its header has no plausible length")
            spans = sorted(_spans(HeaderReader(file.read(length).decode())))
        places = [0, *itertools.chain.from_iterable(spans), size]
        if places[::2] != places[1::2]:
            raise ValueError("its tensors overlap or leave gaps")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(
            f"'{path.name}' is truncated or damaged, or was made to be read in two ways ({error}); "
            "save or copy it again"
        ) from error


def _spans(header: HeaderReader) -> Iterator[tuple[int, int]]:
    """The begin and the end of each tensor's values."""
    for name in header.members():
        if name == METADATA:
            for _ in header.members():
                header.string()
        else:
            begin, end = header.description()["data_offsets"]
            yield int(begin), int(end)
    if header.place < len(header.text):
        raise ValueError("text follows its header")


class HeaderReader:
    """A reader of JSON objects whose values are strings, or flat objects.

    Attributes:
        place: where the next value begins.

    Raises:
        ValueError: from each method: something else is there.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0

    def members(self) -> Iterator[str]:
        """The names in an object; the caller reads each one's value before it takes the next."""
        self._sign("{")
        names: set[str] = set()
        sign = "}" if self.text.startswith("}", self.place) and self._sign("}") else ","
        while sign == ",":
            name = self.string()
            if name in names:
                raise ValueError("a name occurs twice")
            names.add(name)
            if len(names) > MOST_MEMBERS:
                raise ValueError(f"it has more than {MOST_MEMBERS} members")
            self._sign(":")
            yield name
            sign = self._sign(",}")

    def string(self) -> str:
        """The next value, a string."""
        if not self.text.startswith('"', self.place):
            raise ValueError(f"no string at {self.place}")
        found: str
        found, self.place = scanstring(self.text, self.place + 1, True)
        return found

    def description(self) -> dict[str, Any]:
        """The next value, the description of a tensor."""
        found = _TENSOR.match(self.text, self.place)
        if found is None:
            raise ValueError(f"no description of a tensor at {self.place}")
        self.place = found.end()
        described: dict[str, Any] = _DECODER.decode(found[0])
        return described

    def _sign(self, expected: str) -> str:
        found = _SIGN.match(self.text, self.place)
        if found is None or found[1] not in expected:
            raise ValueError(f"no '{expected}' at {self.place}")
        self.place = found.end()
        return found[1]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
