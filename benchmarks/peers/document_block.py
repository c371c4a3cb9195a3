"""The report between two markers of a Markdown page, and its plots beside it."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.peers import models, plots, runtime_limit, tables
from benchmarks.peers.results import Results
from modelport.loadtests import marked_block

BLOCK = "benchmark"
LEGEND = (
    "A cell is the median of the rounds' requests/s (lowest-highest), **the median of each round's "
    "ratio** to {baseline}, and p50 / p99. Only ratios from one run mean anything."
)


def report(measured: Results, images: dict[str, str]) -> str:
    """The markdown, a section for each model. ``images``: title → link."""
    parts = [tables.machine(measured)]
    for name, rows in measured.models.items():
        model = models.ALL[name]
        rounds = max((len(s) for row in rows.values() for s in row.cases.values()), default=0)
        baseline = (
            "raw ONNX Runtime at batch 1" if model.baseline == runtime_limit.NAME else "MLServer"
        )
        parts.append(f"**{model.title}**, {rounds} rounds. {LEGEND.format(baseline=baseline)}")
        parts.append(tables.servers(rows, model))
        found = (
            tables.batches(rows, model)
            if model.baseline == runtime_limit.NAME
            else tables.ratios(rows)
        )
        if found:
            parts.append(found)
        parts += [f"![{title}]({link})" for title, link in images.items() if title.startswith(name)]
    shared = [title for title in images if not title.startswith(tuple(measured.models))]
    parts += [f"![{title}]({images[title]})" for title in shared]
    return "\n\n".join(parts)


def write(measured: Results, page: Path, folder: Path) -> str:
    """Draw the plots into ``folder`` and replace what stands between the markers."""
    marked_block.check(page, BLOCK)
    images = {
        title: os.path.relpath(file, page.parent)
        for title, file in plots.draw(measured, folder).items()
    }
    text = report(measured, images)
    marked_block.replace(page, BLOCK, text)
    return text
