"""JSON serialisation of a comparison, in both directions."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelport.gateway.repository import untrusted_files
from modelport.loadtests import marked_block
from modelport.loadtests.compare.result import Comparison

FORMAT = "modelport-comparison/1"
MOST_BYTES = 1 << 28


class BadDocument(ValueError):
    """The file is not a comparison; the message names the file and the problem."""


def to_dict(comparison: Comparison) -> dict[str, Any]:
    return {"format": FORMAT, **dataclasses.asdict(comparison)}


def from_dict(document: Mapping[str, Any]) -> Comparison:
    """Parse a comparison.

    Raises:
        BadDocument: a key is missing, unknown, or of another type.
    """
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        raise BadDocument(f"'format' is not {FORMAT}; 'modelport compare --json-report' writes it")
    content = {key: value for key, value in document.items() if key != "format"}
    comparison: Comparison = _read(Comparison, content, "comparison")
    return comparison


def write(comparison: Comparison, path: Path) -> None:
    """Write the comparison to ``path`` atomically; missing folders are made."""
    marked_block.write(path, json.dumps(to_dict(comparison), indent=1) + "\n")


def read(path: Path) -> Comparison:
    """Read a comparison from ``path``.

    Raises:
        BadDocument: the file cannot be read, or is not a comparison.
    """
    try:
        return from_dict(json.loads(untrusted_files.read_text(path, MOST_BYTES)))
    except OSError as error:
        raise BadDocument(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadDocument(f"{path} is not a comparison of modelport: {error}") from error


def _read(kind: Any, value: Any, where: str) -> Any:
    """Convert ``value`` from JSON to the type of the annotation ``kind``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _read_dataclass(kind, value, where)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return _read(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        return _read_tuple(arguments, value, where)
    if origin is not None:  # a mapping of strings to plain values
        if not isinstance(value, Mapping):
            raise BadDocument(f"'{where}' is not an object")
        return {key: _read(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise BadDocument(f"'{where}' is {value!r}, not {kind.__name__}")
    return value


def _read_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise BadDocument(f"'{where}' is not a list")
    if arguments[-1] is Ellipsis:
        kinds = [arguments[0]] * len(value)
    elif len(arguments) == len(value):
        kinds = list(arguments)
    else:
        raise BadDocument(f"'{where}' has {len(value)} members, not {len(arguments)}")
    pairs = zip(kinds, value, strict=True)
    return tuple(_read(kind, each, f"{where}[{i}]") for i, (kind, each) in enumerate(pairs))


def _read_dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise BadDocument(f"'{where}' is not an object")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise BadDocument(f"'{where}' has an unknown key '{unknown[0]}'")
    found = {name: _read(hints[name], each, f"{where}.{name}") for name, each in value.items()}
    try:
        return kind(**found)
    except TypeError as error:
        raise BadDocument(f"'{where}': {error}") from error
