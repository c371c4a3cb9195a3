"""TOML files of tables, whose errors name file and line: ``access.toml:12: ...``."""

from __future__ import annotations

import dataclasses
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from modelport.gateway.errors import UsageError, first_line
from modelport.gateway.runtime.gateway_files import FileContent
from modelport.gateway.toml_tables import InvalidKey, read_table

T = TypeVar("T")

MAX_FILE_BYTES = 256 * 1024
_HEADER = re.compile(r"\s*+\[{1,2}+\s*+([^\[\]]*[^\[\]\s])\s*+\]{1,2}+\s*+(?:#.*)?")
_KEY = re.compile(r"\s*[\"']?([\w-]+)[\"']?\s*[.=]")
#: The position in the message of a ``TOMLDecodeError``.
_AT = re.compile(r" \(at line (\d+), column \d+\)")
#: Name under which keys before the first table are found.
_ROOT = ""


@dataclass(frozen=True)
class TomlTable:
    """A table of a TOML file, or one element of an array of tables.

    Attributes:
        path: The file.
        line: Line of the table's header.
        lines: Lines of the keys.
    """

    path: Path
    name: str
    values: Mapping[str, Any]
    line: int = 1
    lines: Mapping[str, int] = field(default_factory=dict)

    def error(self, message: str, key: str = "") -> UsageError:
        """Make the error for the table, or for one of its keys; ``message`` has the remedy."""
        return UsageError(f"{self.path.name}:{self.lines.get(key, self.line)}: {message}")

    def read(self, kind: type[T]) -> T:
        """Read the table as a dataclass whose fields have readers (``toml_tables.read_by``).

        Raises:
            UsageError: A key is unknown, invalid or missing.
        """
        assert dataclasses.is_dataclass(kind)
        for each in dataclasses.fields(kind):
            required = each.default is each.default_factory is dataclasses.MISSING
            if required and each.name not in self.values:
                raise self.error(f"[{self.name}] needs the key '{each.name}'")
        try:
            read: T = read_table(self.name, kind, self.values)
        except InvalidKey as error:
            raise self.error(str(error), error.key) from None
        return read


@dataclass(frozen=True)
class TomlFile:
    """A parsed file."""

    path: Path
    #: Tables by name; a plain table is the only one of its name.
    tables: Mapping[str, Sequence[TomlTable]]

    def one(self, name: str) -> TomlTable | None:
        """Find the table ``[name]``.

        Raises:
            UsageError: It is written as an array of tables.
        """
        found = self.tables.get(name, ())
        if len(found) > 1:
            raise found[1].error(f"[[{name}]] may not be repeated; write one table [{name}]")
        return found[0] if found else None


def parse_file(file: FileContent, option: str, max_bytes: int = MAX_FILE_BYTES) -> TomlFile:
    """Parse the file that ``option`` names.

    Raises:
        UsageError: It cannot be read, is no TOML, or has keys outside of tables.
    """
    try:
        content = file.read()
    except OSError as error:
        raise UsageError(f"{option} '{file.path}' cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(file.mode):
        raise UsageError(f"{option} '{file.path}' is not a regular file, which can be read again")
    if len(content) > max_bytes:
        raise UsageError(f"{option} '{file.path}' is larger than {max_bytes} bytes")
    return parse(file.path, content)


def parse(path: Path, content: bytes) -> TomlFile:
    """Parse ``content`` of the file ``path``; raise as ``parse_file``."""
    try:
        text = content.decode()
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        message = first_line(error)
        at = _AT.search(message)
        line = int(at[1]) if at else 1
        raise UsageError(f"{path.name}:{line}: not TOML: {_AT.sub('', message)}") from error
    found = _positions(text, document)
    root_lines = found[_ROOT][0][1]
    tables = {}
    for name, value in document.items():
        elements = value if isinstance(value, list) else [value]
        located = found.get(name, [])
        rows = []
        for index, values in enumerate(elements):
            start = root_lines.get(name, 1)
            line, lines = located[index] if index < len(located) else (start, {})
            table = TomlTable(path, name, values if isinstance(values, dict) else {}, line, lines)
            if not isinstance(values, dict):
                raise table.error(f"'{name}' must be a table: write [{name}] above its keys")
            rows.append(table)
        tables[name] = rows
    return TomlFile(path, tables)


def _positions(
    text: str, document: Mapping[str, Any]
) -> dict[str, list[tuple[int, dict[str, int]]]]:
    """Find the line of each table's header, and the lines of its keys.

    ``tomllib`` does not tell them. Multi-line strings are skipped.
    """
    found: dict[str, list[tuple[int, dict[str, int]]]] = {_ROOT: [(1, {})]}
    lines, quoted = found[_ROOT][0][1], False
    for number, line in enumerate(text.splitlines(), 1):
        inside = quoted
        quoted ^= (line.count('"""') + line.count("'''")) % 2 == 1
        if inside:
            continue
        header = _HEADER.fullmatch(line)
        if header is not None:
            name, _, key = header[1].strip("\"'").partition(".")
            if key and name in found:
                found[name][-1][1].setdefault(key.partition(".")[0], number)
            elif name in document:
                lines = {}
                found.setdefault(name, []).append((number, lines))
        elif (assigned := _KEY.match(line)) is not None:
            lines.setdefault(assigned[1], number)
    return found
