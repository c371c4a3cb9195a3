"""The reports as HTML: one file each, that loads nothing, runs nothing, and prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from modelport.loadtests.compare.comparison import Comparison
from modelport.loadtests.gate.decision import Decision
from modelport.loadtests.report import (
    blocks,
    colours,
    figures,
    gate_plots,
    gate_tables,
    loads,
    matrix,
    names,
    plots,
    run_plots,
    run_tables,
    tables,
)
from modelport.loadtests.report.checks import Check, worst
from modelport.loadtests.samples import Run
from modelport.loadtests.summary import summarise

#: What a page may load: nothing. Styles stand in it, and a script would not run.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_comparison(comparison: Comparison, path: Path) -> None:
    """The report of ``modelport compare``."""
    shared = loads.shared(loads.by_load(comparison.candidates))
    page = _render(
        "comparison.html.j2",
        comparison=comparison,
        matrix=matrix.lines(comparison),
        noise=matrix.NOISE,
        decided=matrix.decided(comparison),
        plots=plots.draw(comparison),
        candidates=tables.candidates(comparison),
        resources=tables.resources(comparison),
        loads=[
            (tables.of_load(comparison, load), tables.of_rounds(comparison, load))
            for load in shared
        ],
        others=tables.of_others(comparison),
        errors=tables.errors(comparison),
        slots=len(colours.SERIES),
    )
    blocks.write(path, page)


def write_run(
    run: Run,
    path: Path,
    *,
    checks: Sequence[Check] = (),
    hardware: Mapping[str, str] | None = None,
    command: str = "",
) -> None:
    """The report of ``modelport loadtest``."""
    summary = summarise(run)
    page = _render(
        "run.html.j2",
        run=run,
        summary=summary,
        checks=checks,
        verdict=worst(checks) if checks else None,
        percentiles=run_tables.percentiles(summary),
        counts=run_tables.counts(summary),
        load=run_tables.load(run),
        client=run_tables.client(run),
        warnings=run_tables.warnings(run),
        plots=run_plots.draw(run),
        hardware=hardware or {},
        command=command,
        slots=0,
    )
    blocks.write(path, page)


def write_gate(decision: Decision, path: Path) -> None:
    """The report of ``modelport gate``."""
    differ = decision.agreement
    page = _render(
        "gate.html.j2",
        decision=decision,
        sentence=gate_tables.sentence(decision),
        figure=gate_tables.figure,
        summaries=gate_tables.summaries(decision),
        agreement="" if differ is None else gate_tables.agreement(differ),
        labels=None if differ is None else gate_tables.labels(differ),
        plots=gate_plots.draw(decision),
        slots=2,
    )
    blocks.write(path, page)


def _render(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("modelport.loadtests.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["line"] = names.line
    environment.filters["fit"] = names.fit
    environment.filters["when"] = names.when
    environment.globals |= {
        "policy": POLICY,
        "light": colours.variables(dark=False),
        "dark": colours.variables(dark=True),
        "figures": figures,
    }
    return environment.get_template(template).render(**values)
