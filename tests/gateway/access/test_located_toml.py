"""Errors of TOML files name the line."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from modelport.gateway import toml_tables
from modelport.gateway.access.located_toml import TomlFile, parse, parse_file
from modelport.gateway.errors import UsageError
from modelport.gateway.runtime import gateway_files
from modelport.gateway.toml_tables import read_by

TEXT = '''
# a comment
[jwt]
issuer = "i"   # [rules]
"audience" = """
[[rules]]
size = 3
"""

[[rules]]
models = [
  "a",
  "b",
]
size = 1

[[ rules ]]   # another
size = 2
[rules.more]
'''


def parsed(text: str = TEXT) -> TomlFile:
    return parse(Path("/etc/access.toml"), text.encode())


@dataclass(frozen=True)
class Size:
    size: float = field(metadata=read_by(toml_tables.number(0, 10)))
    models: object = field(default=None, metadata=read_by(lambda value: value))


def test_tables_and_keys_have_their_lines() -> None:
    file = parsed()
    jwt = file.one("jwt")
    assert jwt is not None
    assert (jwt.line, dict(jwt.lines)) == (3, {"issuer": 4, "audience": 5})
    first, second = file.tables["rules"]
    assert (first.line, dict(first.lines)) == (10, {"models": 11, "size": 15})
    assert (second.line, dict(second.lines)) == (17, {"size": 18, "more": 19})


def test_tables_written_inline_have_the_line_of_their_key() -> None:
    file = parsed("\nrules = [{size = 1}, {size = 2}]\nhealth.open = true\njwt = {a = 1}\n")
    assert [table.line for table in file.tables["rules"]] == [2, 2]
    assert [file.tables[name][0].line for name in ("health", "jwt")] == [3, 4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[size]\n\nsize = 11\n", "access.toml:3: size.size = 11 must be a number of at least 0"),
        ("[size]\nsize = 1\n\nmodel = 2\n", "access.toml:4: unknown key 'model' in [size]"),
        ("\n[size]\n", "access.toml:2: [size] needs the key 'size'"),
    ],
)
def test_an_invalid_key_is_an_error_with_its_line(text: str, expected: str) -> None:
    table = parsed(text).one("size")
    assert table is not None
    with pytest.raises(UsageError) as caught:
        table.read(Size)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a]\nb = \n", "access.toml:2: not TOML: Invalid value"),
        ("[a]\n[a]\n", "access.toml:2: not TOML: Cannot declare"),
        ("a = 1\n", "access.toml:1: 'a' must be a table: write [a] above its keys"),
        ("[[x]]\n\n[[x]]\n", "access.toml:3: [[x]] may not be repeated; write one table [x]"),
        ("a = " + "[" * 100_000, "access.toml:1: not TOML"),
    ],
)
def test_a_file_of_another_form_is_an_error_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(text).one("x")
    assert str(caught.value).startswith(expected)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--access '.*/none' cannot be read"):
        parse_file(gateway_files.read(tmp_path / "none"), "--access")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="bytes:1: not TOML"):
        parse_file(gateway_files.read(tmp_path / "bytes"), "--access")
    (tmp_path / "long").write_text("#" * 101)
    with pytest.raises(UsageError, match="larger than 100 bytes"):
        parse_file(gateway_files.read(tmp_path / "long"), "--access", 100)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"--access '.*/pipe' is not a regular file"):
        parse_file(gateway_files.read(tmp_path / "pipe"), "--access")
