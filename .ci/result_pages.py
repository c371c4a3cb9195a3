"""The pages with results of long runs: each names the commit that it reports.

    python .ci/result_pages.py docs/sweep.md     # after its results are written

As a hook of MkDocs it adds to a page that the code has changed since.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class ResultPage(NamedTuple):
    """A page, the make target that writes it, and the code whose results it has."""

    verb: str
    code: tuple[str, ...]


PAGES = {
    "docs/benchmarks/exports.md": ResultPage("table", ("exporters", "tests/export_figures")),
    "docs/benchmarks/servers.md": ResultPage("bench", ("gateway", "benchmarks/peers")),
    "docs/peer-suites.md": ResultPage("peer-suites", ("gateway", "tests/peer_suites")),
    "docs/protocols/index.md": ResultPage("matrix", ("gateway", "tests/matrix")),
    "docs/sweep.md": ResultPage("sweep", ("exporters", "tests/sweep")),
    "docs/sweep-drawn.md": ResultPage("sweep-drawn", ("exporters", "tests/sweep")),
    "docs/operators.md": ResultPage("sweep-operators", ("exporters", "tests/sweep")),
}
STAMP = re.compile(r"^Results at commit `(\w+)`.*\.$", re.MULTILINE)
TITLE = re.compile(r"^# .*\n", re.MULTILINE)


def stamped(text: str, page: ResultPage, root: Path = ROOT) -> str:
    """``text`` with the present commit, where it names one or below its title."""
    line = f"Results at commit `{_git(root, 'rev-parse', '--short=12', 'HEAD')}`"
    if _git(root, "status", "--porcelain", "--", *page.code):
        line += ", with changes that are not committed"
    if STAMP.search(text):
        return STAMP.sub(f"{line}.", text)
    return TITLE.sub(lambda title: f"{title[0]}\n{line}.\n", text, count=1)


def age(text: str, page: ResultPage, root: Path = ROOT) -> str:
    """A sentence about changes of the code since the page was written; empty if none are known."""
    found = STAMP.search(text)
    again = f"`make {page.verb}` writes this page again."
    if found is None:
        return f"This page does not name the commit that it reports; {again}"
    code = " and ".join(f"`{folder}/`" for folder in page.code)
    try:
        _git(root, "rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):  # an archive of the sources
        return ""
    try:
        commits = _git(root, "rev-list", "--count", f"{found[1]}..HEAD", "--", *page.code)
    except subprocess.CalledProcessError:
        return f"This history does not have that commit; {code} may have changed since."
    if commits == "0" and "not committed" not in found[0]:
        return ""
    return f"Later commits that change {code}: {commits}; {again}"


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Add the page's age to its stamp."""
    known = PAGES.get(f"docs/{page.file.src_uri}")
    told = "" if known is None else age(markdown, known)
    if not told:
        return markdown
    return STAMP.sub(lambda stamp: f"{stamp[0]}\n\n!!! warning\n\n    {told}", markdown, count=1)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        name = Path(argument).resolve().relative_to(ROOT).as_posix()
        file = ROOT / name
        file.write_text(stamped(file.read_text(), PAGES[name]))
