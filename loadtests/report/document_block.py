"""Comparisons in Markdown: `python -m modelport.loadtests.report.document_block`.

What `modelport compare --json-report` wrote becomes a block between `<!-- compare: begin -->` and
`<!-- compare: end -->`, with the hardware beside the figures, and SVG files beside the page.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from modelport.loadtests import marked_block
from modelport.loadtests.compare import json_document
from modelport.loadtests.compare.result import Comparison
from modelport.loadtests.report import (
    comparison_plots,
    comparison_tables,
    loads,
    markdown,
    svg,
    text_escaping,
)
from modelport.loadtests.system.environments import Missing

BLOCK, PLOTS = "compare", Path("docs/benchmarks")
PAGE = PLOTS / "formats.md"
#: Of the plots that a report has, the kinds that a page shows.
SHOWN = ("latency", "rate-under-slo", "cold-start", "size-error")


def section(comparison: Comparison, images: dict[str, str]) -> str:
    """One model's part. ``images``: title → link."""
    parts = [
        f"**{markdown.text(comparison.model)}** ({markdown.text(comparison.source)}): "
        f"{markdown.machine(comparison)}",
        markdown.verdicts(comparison),
    ]
    for number, candidate in enumerate(comparison.candidates, start=1):
        if candidate.disqualified:
            name, why = markdown.text(candidate.name), markdown.text(candidate.disqualified)
            parts.append(f"Disqualified: {number} {name}: {why}.")
    shared = loads.shared(loads.by_load(comparison.candidates))
    shown = [comparison_tables.of_load(comparison, load) for load in shared]
    shown += [comparison_tables.resources(comparison), comparison_tables.candidates(comparison)]
    parts += map(markdown.captioned, shown)
    if comparison.absent:
        absent = (f"{markdown.text(a.name)} ({markdown.text(a.why)})" for a in comparison.absent)
        parts.append(f"Not measured on this machine: {'; '.join(absent)}.")
    parts += [f"![{markdown.text(title)}]({link})" for title, link in images.items()]
    return "\n\n".join(parts)


def write(
    comparisons: Sequence[Comparison], readme: Path, block: str = BLOCK, folder: Path = PLOTS
) -> str:
    """Draw the plots into ``folder`` and replace the block; raises ``blocks.NoMarkers``."""
    marked_block.check(readme, block)
    taken: set[str] = set()
    sections = []
    for comparison in comparisons:
        prefix = text_escaping.slug(comparison.model)
        if prefix in taken:
            raise Missing(
                f"two comparisons are of '{text_escaping.line(comparison.model, 80)}'; give one"
            )
        taken.add(prefix)
        images = {}
        for drawn in comparison_plots.draw(comparison, SHOWN):
            file = folder / f"{prefix}-{drawn.name}.svg"
            marked_block.write(file, svg.standalone(drawn))
            images[drawn.title] = os.path.relpath(file, readme.parent).replace(os.sep, "/")
        sections.append(section(comparison, images))
    text = "\n\n".join(sections)
    marked_block.replace(readme, block, text)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m modelport.loadtests.report.document_block",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "comparison",
        nargs="+",
        type=Path,
        metavar="COMPARISON.json",
        help="as 'modelport compare --json-report' wrote it; one for each model",
    )
    parser.add_argument("--readme", type=Path, default=PAGE, metavar="FILE")
    parser.add_argument(
        "--block", default=BLOCK, metavar="NAME", help="the name in the markers [%(default)s]"
    )
    parser.add_argument(
        "--plots",
        type=Path,
        default=PLOTS,
        metavar="FOLDER",
        help="where the SVG files go [%(default)s]",
    )
    options = parser.parse_args(arguments)
    try:
        comparisons = [json_document.read(path) for path in options.comparison]
    except json_document.BadDocument as error:
        raise Missing(str(error)) from error
    write(comparisons, options.readme, options.block, options.plots)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Missing as error:
        sys.exit(str(error))
