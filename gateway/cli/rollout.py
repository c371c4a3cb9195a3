"""``modelport rollout``: start, watch and command rollouts of a running gateway."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import click

from modelport.gateway import slo
from modelport.gateway.cli import rollout_display
from modelport.gateway.cli.admin_client import DEFAULT_URL, AdminClient
from modelport.gateway.cli.errors import Failure, OneLineGroup
from modelport.gateway.cli.paths import EXISTING, WRITTEN
from modelport.gateway.cli.rollout_options import read_share, read_shares, request_of, user_name
from modelport.gateway.cli.server_credentials import CommandT, credential_options
from modelport.gateway.cli.tables import printable
from modelport.gateway.errors import ModelportError, Unavailable, UsageError
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.scan import is_model_name
from modelport.gateway.rollout.plan import (
    MAX_REQUESTS,
    MOST_POWER,
    RolloutPlan,
)
from modelport.gateway.rollout.shared_state.state import RolloutPhase

#: Exit codes of ``start``; the others are those of ``--wait``.
PROMOTED, ROLLED_BACK, NOT_STARTED, UNDECIDED = 0, 1, 2, 3
#: Time between two looks at the status.
LOOK_SECONDS = 0.5
#: Time for a gateway to be started again while a command waits.
RESTART_SECONDS = 120.0
_ROLLOUTS = "/v2/rollouts"
#: Most rows of feedback in one request, and the size of a file of them.
FEEDBACK_ROWS, MAX_FEEDBACK_BYTES = 10_000, 1 << 30
_STAGE = slo.RolloutSettings()


@click.group(cls=OneLineGroup)
def rollout() -> None:
    """Replace a version by a candidate step by step; roll it back if it does harm."""


def _url(command: CommandT) -> CommandT:
    text = "URL of the gateway's metrics port."
    option = click.option("--url", "-u", default=DEFAULT_URL, show_default=True, help=text)
    return option(credential_options(command))


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_reason = click.option("--reason", default="", metavar="TEXT", help="Reason, for the history.")


@rollout.command()
@click.argument("model")
@click.option(
    "--candidate",
    required=True,
    metavar="VERSION|MODEL[/VERSION]",
    help="A version of MODEL, or another model of the gateway, such as a route to another server.",
)
@click.option(
    "--baseline",
    type=click.IntRange(min=1),
    help="Version to replace.  [default: the version of --label, else the default version]",
)
@click.option(
    "--label", default="", help="Divert requests for this label, too, and move it on promotion."
)
@click.option(
    "--shadow",
    type=read_share,
    default="0",
    metavar="SHARE",
    help="Begin with a stage that copies this share of the requests to the candidate, and "
    "compares the answers.  [default: no shadow stage]",
)
@click.option(
    "--steps",
    type=read_shares,
    default="1%,5%,25%,100%",
    show_default=True,
    metavar="SHARE,...",
    help="The candidate's share of the requests in each stage. One step of 100% is blue/green.",
)
@click.option(
    "--slo",
    "slo_file",
    type=EXISTING,
    metavar="FILE",
    help="File with the limits (slo.toml).",
)
@click.option(
    "--gate-report",
    type=EXISTING,
    help="JSON report of 'modelport gate', for the share of decisions that a retrained candidate "
    "may change.",
)
@click.option(
    "--max-disagreement",
    type=read_share,
    metavar="SHARE",
    help="Largest share of the compared answers that may differ.  [default: slo.toml's, or the "
    "gate report's; a retrained candidate needs one]",
)
@click.option(
    "--no-disagreement-limit",
    is_flag=True,
    help="Let any share of a retrained candidate's decisions differ; how they do still counts.",
)
@click.option(
    "--min-requests",
    type=click.IntRange(1, MAX_REQUESTS),
    help=f"Minimum requests of a stage.  [default: slo.toml's, or {_STAGE.min_requests}]",
)
@click.option(
    "--power",
    type=click.FloatRange(0, MOST_POWER),
    help="Probability with which a stage must have found the harm that it is meant to find, before "
    f"it ends; 0 for none.  [default: slo.toml's, or {_STAGE.power}]",
)
@click.option(
    "--min-seconds",
    type=click.FloatRange(min=0),
    help=f"Minimum duration of a stage.  [default: slo.toml's, or {_STAGE.min_seconds:g}]",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Maximum duration of a stage; then the rollout pauses.  [default: slo.toml's, or "
    f"{_STAGE.max_seconds:g}]",
)
@click.option(
    "--sticky",
    default="request",
    show_default=True,
    metavar="request|header|principal|parameter:NAME",
    help="Assign requests at random, or by the key in the header x-modelport-route-key, by their "
    "caller (with --access), or by a parameter.",
)
@click.option(
    "--pair",
    type=read_share,
    is_flag=False,
    flag_value="100%",
    metavar="[SHARE]",
    help="Send this share of all requests to both sides in the canary stages, too, at most each "
    "that the candidate answers, and compare the answers; without a SHARE, each.  [default: "
    f"slo.toml's, or {100 * _STAGE.pair:g}%]",
)
@click.option("--manual", is_flag=True, help="Wait for 'promote' after each stage.")
@click.option("--keep", is_flag=True, help="Keep the candidate loaded after a rollback.")
@click.option(
    "--keep-inputs",
    type=click.IntRange(0, 1000),
    default=10,
    show_default=True,
    help="Number of requests with disagreeing answers to keep for review; 0 for private data.",
)
@click.option(
    "--retrained/--same-checkpoint",
    default=None,
    help="Compare decisions, or values.  [default: from the certificates]",
)
@click.option(
    "--webhook",
    "webhooks",
    multiple=True,
    metavar="URL",
    help="Call this URL before each stage, and after each change. Repeatable.",
)
@click.option("--wait", is_flag=True, help="Wait until it is promoted (exit 0) or rolled back (1).")
@_url
@_json
def start(model: str, url: str, wait: bool, as_json: bool, **options: Any) -> None:
    """Start to replace the served version of MODEL by a candidate.

    With --wait, the exit code is 0 if the candidate is promoted, 1 if it is rolled back, and 3 if
    the rollout pauses undecided, or if its outcome is not known. It is 2 if the rollout does not
    start.
    """
    with _failing(NOT_STARTED):
        client = AdminClient(url)
        state = client.post(_path(model), request_of(**options))
    plan = RolloutPlan.from_json(state["plan"])
    if not as_json:
        click.echo(
            f"Started the rollout of {plan.candidate.model} version {plan.candidate.version} "
            f"in place of version {plan.baseline.version}."
        )
    if wait:
        with _failing(UNDECIDED):
            _wait(client, model, plan.id, as_json=as_json)
    if as_json:
        click.echo(json.dumps(state, indent=2))


@contextlib.contextmanager
def _failing(code: int) -> Iterator[None]:
    """Give an error this exit code, so that none means an outcome."""
    try:
        yield
    except ModelportError as error:
        raise Failure(error, code) from error


def _wait(client: AdminClient, model: str, rollout_id: str, *, as_json: bool) -> NoReturn:
    """Show the stages until the rollout ends or pauses; end with the exit code."""
    shown: list[str] = []
    problem = ""
    while True:
        state = _patiently(client, _path(model))
        if state["plan"]["id"] != rollout_id:
            raise Unavailable(f"another rollout of '{model}' has started")
        lines = [rollout_display.event_line(state, event) for event in state["events"]]
        for line in lines[len(shown) :] if not as_json else ():
            click.echo(line)
        shown = lines
        if state["problem"] not in ("", problem) and not as_json:
            click.echo(rollout_display.problem_line(state["problem"]))
        problem = state["problem"]
        phase = RolloutPhase(state["phase"])
        if phase is RolloutPhase.PAUSED or (phase.ended and state["settled"]):
            break
        time.sleep(LOOK_SECONDS)
    if as_json:
        click.echo(json.dumps(state, indent=2))
    elif state["unsettled_reason"]:
        click.echo(printable(f"The configuration has not changed: {state['unsettled_reason']}"))
    codes = {RolloutPhase.PROMOTED: PROMOTED, RolloutPhase.ROLLED_BACK: ROLLED_BACK}
    raise SystemExit(codes.get(phase, UNDECIDED))


def _patiently(client: AdminClient, path: str) -> Any:
    """The document at ``path``; a gateway that is being started again is waited for."""
    limit = time.monotonic() + RESTART_SECONDS
    while True:
        try:
            return client.get(path)
        except Unavailable:
            if time.monotonic() > limit:
                raise
        time.sleep(LOOK_SECONDS)


@rollout.command()
@click.argument("model", required=False, default="")
@_url
@_json
@click.option("--watch", is_flag=True, help="Show changes until the rollout ends.")
def status(model: str, url: str, as_json: bool, watch: bool) -> None:
    """Show the rollout of MODEL, or all rollouts.

    On a terminal, the view of a rollout that is running is updated until it ends.
    """
    client = AdminClient(url)
    if not model:
        states = client.get(_ROLLOUTS)
        if as_json:
            click.echo(json.dumps(states, indent=2))
        else:
            rollout_display.show_all(states)
        return
    path = _path(model)
    if as_json:
        click.echo(json.dumps(client.get(path), indent=2))
    elif watch or rollout_display.is_terminal():
        rollout_display.live(lambda: client.get(path))
    else:
        rollout_display.show(client.get(path))


@rollout.command()
@click.argument("model")
@_url
@_json
def history(model: str, url: str, as_json: bool) -> None:
    """List the rollouts of MODEL that have ended, latest first, with evidence and verdict."""
    states = AdminClient(url).get(_path(model, "history"))
    if as_json:
        click.echo(json.dumps(states, indent=2))
        return
    for number, state in enumerate(states, start=1):
        rollout_display.show(state, number)
    if not states:
        click.echo(f"No rollout of {model} has ended yet.")


@rollout.command()
@click.argument("model")
@_url
@click.option(
    "--output",
    "-o",
    type=WRITTEN,
    help="File to write.  [default: standard output]",
)
def examples(model: str, url: str, output: Path | None) -> None:
    """Print the kept requests of MODEL with disagreeing answers, as JSON."""
    found = json.dumps(AdminClient(url).get(_path(model, "examples")), indent=2)
    if output is None:
        click.echo(found)
    else:
        try:
            output.write_text(found + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"'{output}' cannot be written: {error.strerror}") from error


@rollout.command()
@click.argument("model")
@click.argument("file", type=EXISTING)
@_url
def feedback(model: str, file: Path, url: str) -> None:
    """Send true labels that became known later: a JSON list of {"id": ..., "label": ...}."""
    try:
        rows = json.loads(untrusted_files.read_text(file, MAX_FEEDBACK_BYTES))
    except OSError as error:
        raise UsageError(f"'{file}' cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'{file}' is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise UsageError(f'\'{file}\' is not a JSON list of {{"id": ..., "label": ...}}')
    client, path = AdminClient(url), _path(model, "feedback")
    counted = unknown = repeated = 0
    for first in range(0, max(1, len(rows)), FEEDBACK_ROWS):
        answer = client.post(path, {"rows": rows[first : first + FEEDBACK_ROWS]})
        counted += answer["counted"]
        unknown += len(answer["unknown"])
        repeated += len(answer["repeated"])
    click.echo(
        f"{counted} labels counted, {unknown} of unknown requests, {repeated} already counted"
    )


def _command(name: str, help: str, said: str) -> None:
    @rollout.command(name, help=help)
    @click.argument("model")
    @_reason
    @_url
    @_json
    def command(model: str, reason: str, url: str, as_json: bool) -> None:
        client, request = AdminClient(url), {"reason": reason, "by": user_name()}
        state = client.post(_path(model, name), request)
        click.echo(json.dumps(state, indent=2) if as_json else f"{model}: {said}")


_command("pause", "Keep the current share, and decide nothing except a rollback.", "paused")
_command("resume", "Continue after a pause.", "running")
_command(
    "promote",
    "Begin the next stage; after the last one, make the candidate the default.",
    "advanced",
)
_command("rollback", "Send all requests to the baseline at once.", "rolled back")


def _path(model: str, *rest: str) -> str:
    """The path of a model's rollout, or of a resource below it.

    Raises:
        UsageError: ``model`` cannot be part of a path.
    """
    if not is_model_name(model):
        raise UsageError(f"'{model}' is not a valid model name")
    return "/".join((_ROLLOUTS, quote(model, safe=""), *rest))
