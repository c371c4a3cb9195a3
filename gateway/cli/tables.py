"""Tables of text on standard output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType

import click

#: The column whose cells have colours.
STATE = "state"


def print_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    colours: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Print ``rows`` below the titles in ``head``; a cell may have several lines.

    Columns in ``numbers`` are aligned to the right. ``colours`` are those of texts in the column
    ``state``.
    """
    table = [[[printable(line) for line in cell.split("\n")] for cell in row] for row in rows]
    table.insert(0, [[title] for title in head])
    widths = [max(len(line) for row in table for line in row[i]) for i in range(len(head))]
    for number, row in enumerate(table):
        for lines in zip_longest(*row, fillvalue=""):
            parts = []
            for title, width, text in zip(head, widths, lines, strict=True):
                space = " " * (width - len(text))
                colour = colours.get(text) if title == STATE else None
                shown = click.style(text, fg=colour, bold=number == 0)
                parts.append(space + shown if title in numbers else shown + space)
            click.echo("  ".join(parts).rstrip())


def printable(text: object) -> str:
    """``text`` without control characters, as names in an artifact are untrusted."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))
