"""A table of the file of routes, whose values are checked as they are taken."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from modelport.gateway.errors import InvalidArgument

T = TypeVar("T")

#: A name, an IPv4 address, or an IPv6 address in brackets; then a port.
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})\Z")
_TYPES = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list of strings",
    dict: "a table",
}


class RouteTable:
    """A table of the file; keys that are never read are unknown."""

    def __init__(self, where: str, content: Any) -> None:
        self.where = where
        if type(content) is not dict:
            raise InvalidArgument(f"{where} must be a table")
        for key in content:
            if type(key) is not str:
                raise InvalidArgument(f"{where}: {key!r} must be a string; put it in quotes")
        self._content: dict[str, Any] = content
        #: The keys that are known, in order.
        self._asked: dict[str, None] = {}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._content.items())

    def __contains__(self, key: str) -> bool:
        return key in self._content

    def wrong(self, key: str, problem: str) -> InvalidArgument:
        return InvalidArgument(f"{self.where} '{key}' {problem}")

    def take(self, key: str, kind: type[T], default: T) -> T:
        """The value of ``key``, which must be of type ``kind``; an integer may be a float."""
        self._asked[key] = None
        value: Any = self._content.get(key, default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.wrong(key, f"must be {_TYPES[kind]}, not {value!r}")
        return value

    def simple(self, default: Any) -> dict[str, Any]:
        """The values of a named tuple's fields that are numbers, texts or truth values by default.

        Those in seconds must be above 0.
        """
        return {
            key: self.seconds(key, value)
            if key.endswith("_seconds")
            else self.take(key, type(value), value)
            for key, value in default._asdict().items()
            if type(value) in (bool, int, float, str)
        }

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.take(key, list, [])
        if not all(type(value) is str and value for value in values):
            raise self.wrong(key, "must be a list of strings, none of them empty")
        return tuple(values)

    def seconds(self, key: str, default: float) -> float:
        value = self.take(key, float, default)
        if not (math.isfinite(value) and value > 0):
            raise self.wrong(key, f"must be a number of seconds above 0, not {value:g}")
        return value

    def address(self, key: str, value: str) -> str:
        match = _ADDRESS.match(value)
        if match is None or not 0 < int(match[2]) < 65536:
            raise self.wrong(
                key, f"must be 'host:port' (an IPv6 address in brackets), not {value!r}"
            )
        return value

    def choice(self, key: str, values: tuple[str, ...], default: str) -> str:
        value = self.take(key, str, default)
        if value not in values:
            raise self.wrong(key, f"must be one of {', '.join(values)}, not {value!r}")
        return value

    def file(self, key: str, folder: Path) -> Path | None:
        """A file that can be read, relative to ``folder``."""
        text = self.take(key, str, "")
        if not text:
            return None
        try:
            with (folder / text).open("rb"):
                return folder / text
        except OSError as error:
            raise self.wrong(key, f"cannot be read: {folder / text}: {error.strerror}") from error

    def finish(self) -> None:
        for key in self._content:
            if key not in self._asked:
                raise self.wrong(key, f"is unknown; use {', '.join(self._asked)}")
