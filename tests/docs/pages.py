"""Pages of the documentation and their fenced blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
OUTSIDE = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deploy/README.md",
    "deploy/ray/README.md",
)
#: Written by programs, whole: no prose and no blocks.
WRITTEN = (
    "peer-suites.md",
    "cli.md",
    "http.md",
    "configuration.md",
    "config-pbtxt.md",
    "errors.md",
)
FILES = sorted(
    [ROOT / name for name in OUTSIDE]
    + [file for file in (ROOT / "docs").rglob("*.md") if file.name not in WRITTEN]
)
_FENCE = re.compile(
    r"^```(?P<language>[^\s`]*)(?: title=\"(?P<title>[^\"]*)\")?(?P<rest>[^\n]*)\n"
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class CodeBlock(NamedTuple):
    """One fenced block."""

    file: Path
    line: int
    language: str
    title: str
    rest: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"

    @property
    def target(self) -> str:
        """The file that the block is written to; empty for one that is not."""
        return "" if " " in self.title else self.title


def blocks(file: Path) -> Iterator[CodeBlock]:
    content = file.read_text()
    for match in _FENCE.finditer(content):
        line = content.count("\n", 0, match.start()) + 1
        language, title, rest, text = match.group("language", "title", "rest", "text")
        yield CodeBlock(file, line, language, title or "", rest, text)


def commands(text: str) -> Iterator[str]:
    """The commands of a shell block: continued lines joined, quoted newlines kept."""
    pending = ""
    for line in text.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # within quotes
            pending += "\n"
            continue
        if words:
            yield pending
        pending = ""
    assert not pending.strip(), f"an unfinished command: {pending}"


def prose(file: Path) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", file.read_text())
