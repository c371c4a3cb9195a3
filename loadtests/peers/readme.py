"""The report between two markers of the README, and its plots beside it."""

from __future__ import annotations

import os
from pathlib import Path

from loadtests.environments import Missing
from loadtests.peers import models, plots, raw, tables
from loadtests.peers.results import Results

BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
LEGEND = (
    "A cell is the median of the rounds' requests/s (lowest-highest), **the median of each round's "
    "ratio** to {baseline}, and p50 / p99. Only ratios from one run mean anything."
)


class NoMarkers(Missing):
    """The file has no place for the report."""


def check(readme: Path) -> None:
    """Raise before an hour's work is done, not after."""
    if not readme.is_file():
        raise NoMarkers(f"'{readme}' is no file")
    before, _, after = readme.read_text().partition(BEGIN)
    if END not in after or not (before or after):
        raise NoMarkers(f"'{readme}' lacks the markers '{BEGIN}' and '{END}'")


def report(measured: Results, images: dict[str, str]) -> str:
    """The markdown, a section for each model. ``images``: title → link."""
    parts = [tables.machine(measured)]
    for name, rows in measured.models.items():
        model = models.ALL[name]
        rounds = max((len(s) for row in rows.values() for s in row.cases.values()), default=0)
        baseline = "raw ONNX Runtime at batch 1" if model.baseline == raw.NAME else "MLServer"
        parts.append(f"**{model.title}**, {rounds} rounds. {LEGEND.format(baseline=baseline)}")
        parts.append(tables.servers(rows, model))
        found = tables.batches(rows) if model.baseline == raw.NAME else tables.ratios(rows)
        if found:
            parts.append(found)
        parts += [f"![{title}]({link})" for title, link in images.items() if title.startswith(name)]
    shared = [title for title in images if not title.startswith(tuple(measured.models))]
    parts += [f"![{title}]({images[title]})" for title in shared]
    return "\n\n".join(parts)


def write(measured: Results, readme: Path, folder: Path) -> str:
    """Draw the plots into ``folder`` and replace what stands between the markers."""
    check(readme)
    images = {
        title: os.path.relpath(file, readme.parent)
        for title, file in plots.draw(measured, folder).items()
    }
    text = report(measured, images)
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return text
