"""Strict reading of TOML files whose tables are dataclasses.

Unknown tables and keys are errors, and so are values of the wrong type or range. Each field names
its reader: ``field(default=..., metadata=read_by(number(0, 1)))``.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelport.gateway.errors import UsageError, first_line
from modelport.gateway.repository import untrusted_files

#: Python reads a dotted key in time that grows with the square of its length.
MAX_FILE_BYTES = 32 * 1024
MAX_SHOWN = 100
#: Checks a key's value; raises ``InvalidValue`` with the expected type.
Reader = Callable[[Any], Any]


class InvalidValue(ValueError):
    """The expected type of an invalid value."""


class InvalidKey(ValueError):
    """A key that is unknown, or whose value is invalid."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


def number(least: float, most: float, *, open_end: bool = False) -> Reader:
    """A finite number in ``least..most``; ``least`` itself is excluded if ``open_end``."""
    wanted = "a number"
    wanted += f" {'above' if open_end else 'of at least'} {least:g}" if math.isfinite(least) else ""
    wanted += f", at most {most:g}" if math.isfinite(most) else ""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidValue(wanted)
        try:
            number = float(value)
        except OverflowError:
            raise InvalidValue(wanted) from None
        too_small = number <= least if open_end else number < least
        if not math.isfinite(number) or too_small or number > most:
            raise InvalidValue(wanted)
        return number

    return read


def count(least: int, most: float = math.inf) -> Reader:
    """A whole number in ``least..most``."""
    wanted = f"a whole number of at least {least}"
    wanted += f", at most {most}" if math.isfinite(most) else ""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidValue(wanted)
        return value

    return read


def or_off(reader: Reader) -> Reader:
    """``false``, which is None, or a value for ``reader``."""

    def read(value: Any) -> Any:
        if value is False:
            return None
        try:
            return reader(value)
        except InvalidValue as error:
            raise InvalidValue(f"{error}, or false for no such criterion") from None

    return read


def text(value: Any) -> str:
    """A non-empty string."""
    if not isinstance(value, str) or not value:
        raise InvalidValue("a non-empty string")
    return value


def digest(value: Any) -> str:
    """A SHA-256 in hexadecimal digits, in lower case."""
    if not isinstance(value, str) or not re.fullmatch("[0-9a-fA-F]{64}", value):
        raise InvalidValue("a SHA-256: 64 hexadecimal digits")
    return value.lower()


def truth(value: Any) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        raise InvalidValue("true or false")
    return value


def paths(value: Any) -> tuple[Path, ...]:
    """A list of files."""
    if not isinstance(value, list) or not all(isinstance(path, str) and path for path in value):
        raise InvalidValue("a list of files")
    return tuple(Path(path) for path in value)


def names(value: Any) -> tuple[str, ...]:
    """A list of names or globs."""
    if not isinstance(value, list) or not value or not all(isinstance(n, str) and n for n in value):
        raise InvalidValue("a list of names, such as ['ci', 'fraud*']")
    return tuple(value)


def one_of(names: Sequence[str]) -> Reader:
    """One of these strings."""

    def read(value: Any) -> str:
        if value not in names:
            raise InvalidValue(f"one of {', '.join(names)}")
        return str(value)

    return read


def read_by(reader: Reader) -> dict[str, Reader]:
    """The metadata of a field."""
    return {"read": reader}


def read_file(path: Path, option: str) -> dict[str, Any]:
    """The document of a TOML file, which ``option`` named.

    Raises:
        UsageError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(untrusted_files.read_text(path, MAX_FILE_BYTES))
    except OSError as error:
        raise UsageError(
            f"{option} '{path}' cannot be read ({error.strerror}); an empty file sets the defaults"
        ) from error
    except (ValueError, RecursionError) as error:  # an endless number is no TOMLDecodeError
        raise UsageError(f"'{path}' is not TOML: {first_line(error)}") from error


def read_table(name: str, kind: Any, table: Mapping[str, Any]) -> Any:
    """A dataclass of ``kind`` from the table ``[name]``; each field's metadata has its reader.

    Raises:
        InvalidKey: an unknown key, or an invalid value; the message names it.
    """
    readers: dict[str, Reader] = {
        one.name: one.metadata["read"] for one in dataclasses.fields(kind)
    }
    values = {}
    for key, value in table.items():
        if key not in readers:
            message = f"unknown key '{key}' in [{name}]; its keys are {', '.join(readers)}"
            raise InvalidKey(message, key)
        try:
            values[key] = readers[key](value)
        except InvalidValue as error:
            message = f"{name}.{key} = {_shown(value)} must be {error}"
            raise InvalidKey(message, key) from None
    return kind(**values)


def _shown(value: Any) -> str:
    try:
        said = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    except ValueError:  # a number of more digits than Python prints
        said = "a number of too many digits"
    return said if len(said) <= MAX_SHOWN else said[:MAX_SHOWN] + "..."
