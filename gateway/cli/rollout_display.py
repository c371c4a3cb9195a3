"""Rollouts as text and as a live view on a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from modelport.gateway.cli.tables import print_table, printable
from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide
from modelport.gateway.rollout.shared_state.state import RolloutPhase
from modelport.gateway.runtime import terminal

State = Mapping[str, Any]

LOOK_SECONDS = 1.0
#: Latest events that are shown.
MAX_EVENTS = 10
_COLOURS = {"broken": "red", "suspect": "yellow", "kept": "green"}


def is_terminal() -> bool:
    return sys.stdout.isatty() and not terminal.is_dumb()


def event_line(state: State, event: Mapping[str, Any]) -> str:
    """One event of a rollout, in one line."""
    plan = _plan(state)
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    number = min(event["stage"], len(plan.stages) - 1)
    where = f"stage {number + 1} of {len(plan.stages)} ({plan.stages[number]})"
    parts = [f"{at}  {event['kind']}", where, event["reason"], event["by"] and f"by {event['by']}"]
    return printable(", ".join(part for part in parts if part))


def problem_line(text: str) -> str:
    """A problem that keeps a rollout from going on, in one line."""
    return printable(f"{time.strftime('%H:%M:%S')}  waiting: {text}")


def show_all(states: list[State]) -> None:
    """Print all rollouts, one a line."""
    rows = []
    for state in states:
        plan = _plan(state)
        names = [side_name(plan, side) for side in (plan.baseline, plan.candidate)]
        stage = f"{state['stage'] + 1} of {len(plan.stages)}"
        rows.append((plan.model, *names, stage, f"{100 * state['share']:.4g} %", state["phase"]))
    if rows:
        print_table(("model", "baseline", "candidate", "stage", "share", "phase"), rows)
    else:
        click.echo("There are no rollouts on this gateway.")


def side_name(plan: RolloutPlan, side: RolloutSide) -> str:
    """``3``, or ``other/3`` of another model."""
    return str(side.version) if side.model == plan.model else f"{side.model}/{side.version}"


def show(state: State, number: int = 0) -> None:
    """Print one rollout, with its ``number`` in the history if that is given."""
    plan = _plan(state)
    names = [side_name(plan, side) for side in (plan.candidate, plan.baseline)]
    title = f"{plan.model}: version {names[0]} in place of {names[1]}: {state['phase']}"
    title = f"{number}. {title}" if number else title
    click.secho(title, bold=True)
    _show_stages(state, plan)
    if state["evidence"]:
        click.echo()
        evidence = state["evidence"]
        rows = []
        for row in evidence:
            bounds = f"{_figure(row['lower'])} to {_figure(row['upper'])}"
            e_value = f"{math.exp(min(row['log_e_value'], 50.0)):.3g} of {1 / row['alpha']:.3g}"
            figures = (_figure(row["limit"]), _figure(row["estimate"]), bounds, e_value)
            rows.append((row["name"], *figures, row["status"]))
        head = ("criterion", "limit", "estimate", "interval", "e-value", "state")
        print_table(head, rows, colours=_COLOURS)
    click.echo()
    decision = state.get("decision")
    if decision:
        click.echo(f"{decision['verdict']}: {decision['reason']}")
    for text in (state.get("problem"), state["unsettled_reason"]):
        if text:
            click.secho(printable(text), fg="yellow")
    for event in state["events"][-MAX_EVENTS:]:
        click.echo(event_line(state, event))


def live(read: Callable[[], State]) -> None:
    """Show a rollout until it ends."""
    while True:
        state = read()
        click.clear()
        show(state)
        if RolloutPhase(state["phase"]).ended:
            return
        time.sleep(LOOK_SECONDS)


def _show_stages(state: State, plan: RolloutPlan) -> None:
    counts, rows = state["counts"], []
    for number, stage in enumerate(plan.stages):
        mark = ">" if number == state["stage"] else ""
        cells = [""] * 5
        if number < len(counts):
            found = counts[number]
            figures = [found[side]["requests"] for side in ("candidate", "baseline")]
            figures += [found["compared"], found["disagreed"]]
            figures.append(found["failed"] + found["candidate"]["errors"])
            cells = [f"{figure:,}" for figure in figures]
        rows.append((mark, str(stage), *cells))
    head = ("", "stage", "candidate", "baseline", "compared", "disagreed", "failed")
    print_table(head, rows, numbers=head[2:])


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _plan(state: State) -> RolloutPlan:
    return RolloutPlan.from_json(state["plan"])
