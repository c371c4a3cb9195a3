"""``make table``: the figures of exports, written into the documentation."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from modelport.loadtests import marked_block
from tests import verb
from tests.export_figures import all_formats, folders, lowered

PAGE = Path("docs/benchmarks/exports.md")
#: The tables of the page, by the words of their markers.
TABLES: dict[str, Callable[[Path], Iterator[str]]] = {
    "table of exports": all_formats.rows,
    "whole exports": folders.rows,
    "lowered models": lowered.rows,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("tables", nargs="*", help=f"default: {', '.join(TABLES)}")
    arguments = parser.parse_args()
    names = arguments.tables or list(TABLES)
    for name in names:
        marked_block.check(arguments.page, name)
    for name in names:
        lines = []
        with tempfile.TemporaryDirectory() as work:
            for line in TABLES[name](Path(work)):
                print(line, flush=True)
                lines.append(line)
        marked_block.replace(arguments.page, name, "\n".join(lines))
    return 0


if __name__ == "__main__":
    verb.run(main)
