"""Reports as HTML: one self-contained, printable file each, without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from modelport.loadtests import marked_block, number_format
from modelport.loadtests.checks import Check, worst
from modelport.loadtests.compare.result import Comparison
from modelport.loadtests.gate.decision import GateDecision
from modelport.loadtests.load.samples import LoadRun
from modelport.loadtests.load.summary import summarise
from modelport.loadtests.report import (
    colours,
    comparison_plots,
    comparison_tables,
    gate_plots,
    gate_tables,
    loads,
    matrix_text,
    rollout_plots,
    rollout_tables,
    run_plots,
    run_tables,
    text_escaping,
)

#: The page may load nothing; styles are inline, and scripts do not run.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_comparison(comparison: Comparison, path: Path) -> None:
    """The report of ``modelport compare``."""
    shared = loads.shared(loads.by_load(comparison.candidates))
    page = render(
        "comparison.html.j2",
        comparison=comparison,
        matrix=matrix_text.lines(comparison),
        noise=matrix_text.NOISE,
        decided=matrix_text.decided(comparison),
        plots=comparison_plots.draw(comparison),
        candidates=comparison_tables.candidates(comparison),
        resources=comparison_tables.resources(comparison),
        loads=[
            (
                comparison_tables.of_load(comparison, load),
                comparison_tables.of_rounds(comparison, load),
            )
            for load in shared
        ],
        others=comparison_tables.of_others(comparison),
        errors=comparison_tables.errors(comparison),
        slots=len(colours.SERIES),
    )
    marked_block.write(path, page)


def write_run(
    run: LoadRun,
    path: Path,
    *,
    checks: Sequence[Check] = (),
    hardware: Mapping[str, str] | None = None,
    command: str = "",
) -> None:
    """The report of ``modelport loadtest``."""
    summary = summarise(run)
    page = render(
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
    marked_block.write(path, page)


def write_gate(decision: GateDecision, path: Path) -> None:
    """The report of ``modelport gate``."""
    differ = decision.agreement
    page = render(
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
    marked_block.write(path, page)


def write_rollout(
    state: Mapping[str, Any], examples: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """The report of ``modelport rollout report``, from a status of the gateway's API."""
    page = render(
        "rollout.html.j2",
        state=state,
        baseline=rollout_tables.side(state, "baseline"),
        candidate=rollout_tables.side(state, "candidate"),
        tone=rollout_tables.tone(state),
        reason=rollout_tables.reason(state),
        began=rollout_tables.time(state["events"][0]),
        changed=rollout_tables.time(state["events"][-1]),
        criteria=rollout_tables.criteria(state),
        stages=rollout_tables.stages(state),
        events=rollout_tables.events(state),
        examples=rollout_tables.examples(examples),
        plots=rollout_plots.draw(state),
    )
    marked_block.write(path, page)


def render(template: str, **values: Any) -> str:
    """Render a template of a page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("modelport.loadtests.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["line"] = text_escaping.line
    environment.filters["fit"] = text_escaping.fit
    environment.filters["when"] = text_escaping.when
    environment.globals |= {
        "policy": POLICY,
        "light": colours.variables(dark=False),
        "dark": colours.variables(dark=True),
        "figures": number_format,
    }
    return environment.get_template(template).render(**values)
