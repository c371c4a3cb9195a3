"""``modelport drift``: the shift of recorded traffic from a baseline."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.gateway.cli.errors import OneLineCommand
from modelport.gateway.cli.paths import EXISTING, WRITTEN
from modelport.gateway.extras import require_extra
from modelport.gateway.recording.record_encryption import record_key_option
from modelport.loadtests.cli.options import check_writable, interruptible

if TYPE_CHECKING:
    from modelport.loadtests.drift.shift import Drift

EXIT_DRIFTED, EXIT_UNDECIDED = 1, 3
#: Features that are shown on a terminal.
MOST_SHOWN = 20


@click.command(cls=OneLineCommand)
@click.argument("records", type=EXISTING)
@click.option(
    "--baseline",
    type=EXISTING,
    required=True,
    metavar="PATH",
    help="Earlier records; an .npz of rows by tensor name; or a certificate.json, whose held-out "
    "data is beside it.",
)
@click.option(
    "--alpha",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.05,
    show_default=True,
    help="Probability of any false alarm, over all features; with benjamini-hochberg the share of "
    "false ones.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(min=0),
    default=0.1,
    show_default=True,
    help="Population stability index from which a shift counts.",
)
@click.option(
    "--correction",
    type=click.Choice(["holm", "benjamini-hochberg"]),
    default="holm",
    show_default=True,
    help="Correction for the number of features.",
)
@click.option("--json-report", "json_file", type=WRITTEN, help="Write the shifts as JSON.")
@click.option("--html", "html_file", type=WRITTEN, help="Write the shifts as one HTML page.")
@click.option(
    "--prometheus",
    "metrics_file",
    type=WRITTEN,
    metavar="FILE.prom",
    help="Write the shifts as metrics, for node_exporter's textfile collector or a Pushgateway.",
)
@record_key_option
def drift(records: Path, baseline: Path, **options: Any) -> None:
    """Compare the inputs and outputs of recorded requests with a baseline, by feature.

    RECORDS is a model's folder of 'modelport serve --record', or a file in it.

    \b
    modelport drift records/fraud --baseline records-of-june/fraud --html drift.html
    modelport drift records/fraud --baseline held_out.npz
    modelport drift records/fraud --baseline model_repository/fraud/2/certificate.json

    Each element of a row is a feature; large tensors are described by their size, mean, standard
    deviation and extremes. Numbers are tested by Kolmogorov and Smirnov, categories by
    chi-squared, missing values by Fisher. A feature has drifted if its corrected p-value is below
    --alpha and the shift is not negligible: a PSI of --threshold, 2 % of missing values, or 2 % of
    new categories. Rows are taken as independent of each other.

    Exit status: 0 no drift; 1 drift; 2 usage; 3 too few rows, or no feature in common; 4 the extra
    'load' is not installed; 130 interrupted.
    """
    require_extra("load")
    from modelport.loadtests.drift import baseline as baselines
    from modelport.loadtests.drift import features, shift
    from modelport.loadtests.report import drift_report

    check_writable(options[name] for name in ("json_file", "html_file", "metrics_file"))
    with interruptible():
        now = baselines.recorded(records)
        names = {name for each in now for name in each.inputs}
        before = baselines.read(baseline, names)
        found = shift.compare(
            features.columns(before),
            features.columns(now),
            options["alpha"],
            options["threshold"],
            shift.Correction(options["correction"]),
        )
    _tell(found)
    if options["json_file"] is not None:
        text = json.dumps(drift_report.document(found), indent=2)
        options["json_file"].write_text(text + "\n")
    if options["metrics_file"] is not None:
        drift_report.write_metrics(found, options["metrics_file"], now[0].model)
    if options["html_file"] is not None:
        facts = [
            ("records", str(records)),
            ("baseline", str(baseline)),
            ("correction", options["correction"]),
            ("command", shlex.join(["modelport", *sys.argv[1:]])),
        ]
        drift_report.write(found, options["html_file"], facts)
    if not found.shifts:
        sys.exit(EXIT_UNDECIDED)
    if found.drifted:
        sys.exit(EXIT_DRIFTED)


def _tell(found: Drift) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from modelport.loadtests.report import console, drift_report, text_escaping

    screen = console.standard()
    shown = found.shifts[:MOST_SHOWN]
    if shown:
        made = drift_report.table(shown, "")
        grid = Table(made.first, *made.head, box=box.SIMPLE)
        for row in made.rows:
            grid.add_row(*(Text(text_escaping.line(cell, 120)) for cell in (row.name, *row.cells)))
        screen.print(grid)
    for note in found.notes[:MOST_SHOWN]:
        screen.print(Text(text_escaping.line(note, 300)))
    screen.print(Text(f"{len(found.drifted)} of {len(found.shifts)} features have drifted"))
