"""The page of the sweep: a table of every architecture and format."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from tests.sweep.attempts import FORMATS, ExportOutcome, ExportVerdict
from tests.sweep.catalogue import catalogue

INTRODUCTION = """\
# Sweep of architectures

`make sweep` exports every architecture below to every format and writes this page. The models are
tiny and have random weights: the sweep is about what can be converted and proven, not about trained
values. An artifact is *published* if modelport's own proof passed, and if it computes what the
original computes beside it in another program, within 1e-3 + 1e-2 · |reference|, over batches of 1
and 3 and three sizes of every axis. What is *refused* has one line with the reason and an exit code
from 2 to 5.
"""

DRAWN = """\
# Sweep of drawn architectures

`make sweep-drawn` draws architectures by a seed ({seed} here) from packages that modelport does not
contain, exports them, and writes this page. No rule of the exporters was written for them: they are
model types of `transformers` that the [sweep](sweep.md) lacks, at tiny size, networks of timm and
torchvision of at most 8 million parameters, and the samples of PyTorch's own tests of `torch.nn`;
weights are random. A model that does not run on plain inputs in PyTorch itself is not drawn.
*Published* and *refused* are as there: the gateway has loaded and answered each artifact that is
published, and it computes what the original computes in another program, over two batches, three
sizes of every axis, and values that are random, at their limits, zero, constant and one-hot.
"""

#: The heading before which the section of other exporters stands.
EVERY = "## Every architecture\n"
PEERS = """\
## Beside other exporters to ONNX

The same models by `torch.onnx.export` with every axis dynamic, and by Optimum (`optimum-onnx`
0.1.0, which has no modules of one's own) in an environment of its own. Each file that they wrote
was held to the same comparison, for the inputs and outputs that it has. *Not compared* are files
with inputs whose valid values nobody declares, files of a part of a model, and models that
modelport does not read. Optimum needs an older transformers (4.57). Where that does not read the
weights that transformers 5 wrote, the file is not compared; some of its refusals may have the same
cause.
"""

_CELLS = {
    ExportVerdict.PUBLISHED: "yes",
    ExportVerdict.REFUSED: "refused",
    ExportVerdict.WRONG: "**wrong**",
    ExportVerdict.CRASHED: "**crashed**",
}


def summary(outcomes: Iterable[ExportOutcome]) -> str:
    """One line for each format."""
    rows = list(outcomes)
    lines = []
    for name in FORMATS:
        counts = Counter(row.verdict for row in rows if row.format == name)
        total = sum(counts.values())
        if total:
            words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ExportVerdict)
            lines.append(
                f"{name:<12} {counts[ExportVerdict.PUBLISHED] / total:6.1%} of {total}: {words}"
            )
    return "\n".join(lines)


def drawn(outcomes: Iterable[ExportOutcome], seed: int) -> str:
    """The whole page of drawn architectures."""
    rows = list(outcomes)
    return "\n".join([DRAWN.format(seed=seed), _totals(rows), _table(rows), _reasons(rows)])


def markdown(outcomes: Iterable[ExportOutcome]) -> str:
    """The whole page, without the table of other exporters."""
    places = {name: place for place, name in enumerate(catalogue())}
    rows = sorted(outcomes, key=lambda row: places.get(row.architecture, len(places)))
    ran = Counter(row.architecture for row in rows)
    whole = sum(count == len(FORMATS) for count in ran.values())
    state = (
        f"{whole} of {len(places)} architectures were tried in every format, {len(ran)} in at "
        "least one.\n"
    )
    return "\n".join([INTRODUCTION, state, _totals(rows), _table(rows), _reasons(rows)])


def published(page: str) -> frozenset[str]:
    """Return the architectures that were published to ONNX, by the page."""
    return frozenset(
        re.findall(rf"^\| `(.+)` \| {_CELLS[ExportVerdict.PUBLISHED]} \|", page, re.MULTILINE)
    )


def cell(text: str) -> str:
    """Return ``text`` as it stands in a table or list of the page."""
    return " ".join(text.split())[:400].replace("|", "\\|").replace("<", "&lt;")


def with_peers(page: str, table: str) -> str:
    """Return ``page`` with the table of other exporters, in place of the one that it has."""
    before, every, after = page.partition(EVERY)
    return f"{before.partition(PEERS)[0]}{PEERS}\n{table}\n\n{every}{after}"


def _formats(rows: list[ExportOutcome]) -> list[str]:
    tried = {row.format for row in rows}
    return [name for name in FORMATS if name in tried]


def _totals(rows: list[ExportOutcome]) -> str:
    lines = ["| format | architectures | published | refused | wrong | crashed |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for name in _formats(rows):
        counts = Counter(row.verdict for row in rows if row.format == name)
        total = sum(counts.values())
        published = counts[ExportVerdict.PUBLISHED]
        share = f"{published} ({published / max(1, total):.0%})"
        others = " | ".join(str(counts[v]) for v in list(ExportVerdict)[1:])
        lines.append(f"| {name} | {total} | {share} | {others} |")
    return "\n".join(lines) + "\n"


def _table(rows: list[ExportOutcome]) -> str:
    cells = {(row.architecture, row.format): _CELLS[row.verdict] for row in rows}
    formats = _formats(rows)
    lines = [EVERY, f"| architecture | {' | '.join(formats)} |"]
    lines.append("|---" * (len(formats) + 1) + "|")
    for name in dict.fromkeys(row.architecture for row in rows):
        found = (cells.get((name, each), "") for each in formats)
        lines.append(f"| `{name}` | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"


def _reasons(rows: list[ExportOutcome]) -> str:
    lines = ["## Reasons\n", "| architecture | format | reason |", "|---|---|---|"]
    lines += (
        f"| `{row.architecture}` | {row.format} | {cell(row.detail)} |"
        for row in rows
        if row.verdict is not ExportVerdict.PUBLISHED
    )
    return "\n".join(lines) + "\n"
