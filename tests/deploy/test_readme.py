"""The table of ``deploy/README.md`` leaves no file out, and names none that is not there."""

from __future__ import annotations

import fnmatch
import re

from tests.deploy import DEPLOY

TEXT = (DEPLOY / "README.md").read_text()
TABLE = TEXT.split("## Tests by file")[1]
ROWS = [row.split("|")[1] for row in TABLE.splitlines() if row.startswith("| `")]
#: What preparing, linting and running leave behind.
MADE = ("__pycache__", "compose/models/")


def named() -> list[str]:
    """Patterns of the table; names after the first of a row are beside it."""
    found = []
    for cell in ROWS:
        first, *others = re.findall(r"`([^`]+)`", cell)
        folder = first.rpartition("/")[0]
        found += [first, *(o if "/" in o else f"{folder}/{o}" for o in others)]
    return found


def test_every_file_is_in_the_table() -> None:
    files = [str(p.relative_to(DEPLOY)) for p in DEPLOY.rglob("*") if p.is_file()]
    files = [name for name in files if not any(part in name for part in MADE)]
    assert len(files) > 30
    patterns = named()
    assert [f for f in files if not any(fnmatch.fnmatch(f, p) for p in patterns)] == []
    assert [p for p in patterns if not fnmatch.filter(files, p)] == []


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (DEPLOY / target).exists(), target
