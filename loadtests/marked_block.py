"""Generated blocks of a document, between `<!-- name: begin -->` and its end marker."""

from __future__ import annotations

import os
from pathlib import Path

from modelport.loadtests.system.environments import Missing


class NoMarkers(Missing):
    """The file lacks the markers of the block."""


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def check(path: Path, name: str) -> None:
    """Raise ``NoMarkers`` early, before an hour of measuring."""
    _around(path, name)


def replace(path: Path, name: str, text: str) -> None:
    """Write ``text`` between the markers of ``path``; raises ``NoMarkers``."""
    before, after = _around(path, name)
    begin, end = markers(name)
    write(path, f"{before}{begin}\n{text.strip()}\n{end}{after}")


def write(path: Path, text: str) -> None:
    """Write a file atomically; missing folders are made.

    A pipe or a device, such as ``/dev/stdout``, is written to in place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _around(path: Path, name: str) -> tuple[str, str]:
    if not path.is_file():
        raise NoMarkers(f"'{path}' is not a file")
    begin, end = markers(name)
    before, opened, rest = path.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise NoMarkers(f"'{path}' lacks the markers '{begin}' and '{end}'")
    return before, after
