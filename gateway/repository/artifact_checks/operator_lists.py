"""The operators that an unsigned model may use: one name per line in this folder's text files."""

from __future__ import annotations

from pathlib import Path


def read(name: str) -> frozenset[str]:
    """The names in ``<name>.txt``; a line that begins with ``#`` is a comment."""
    text = Path(__file__).with_name(f"{name}.txt").read_text()
    return frozenset(line for line in text.splitlines() if not line.startswith("#"))
