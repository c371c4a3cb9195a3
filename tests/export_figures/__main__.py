"""``make table``'s second part: whole exports of folders, and lowered models beside others."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from modelport.exporters.demo_models.table import PAGE, write_table
from tests import verb
from tests.export_figures import folders, lowered

#: The tables of the page, by the words of their markers.
TABLES: dict[str, Callable[[Path], Iterator[str]]] = {
    "whole exports": folders.rows,
    "lowered models": lowered.rows,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("tables", nargs="*", help=f"default: {', '.join(TABLES)}")
    arguments = parser.parse_args()
    for name in arguments.tables or TABLES:
        lines = []
        with tempfile.TemporaryDirectory() as work:
            for line in TABLES[name](Path(work)):
                print(line, flush=True)
                lines.append(line)
        write_table(arguments.page, name, lines)
    return 0


if __name__ == "__main__":
    verb.run(main)
