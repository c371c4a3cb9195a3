"""``modelport rollout report``: a page about a rollout of a running gateway."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import click

from modelport.gateway.cli.admin_client import DEFAULT_URL, AdminClient
from modelport.gateway.cli.errors import OneLineCommand
from modelport.gateway.cli.paths import WRITTEN
from modelport.gateway.cli.server_credentials import credential_options
from modelport.gateway.errors import ModelportError, UsageError
from modelport.gateway.extras import install_extra

_MODEL = re.compile(r"[\w.-]+\Z")


@click.command(cls=OneLineCommand)
@click.argument("model")
@click.option(
    "--url", "-u", default=DEFAULT_URL, show_default=True, help="URL of the gateway's metrics port."
)
@credential_options
@click.option(
    "--output",
    "-o",
    type=WRITTEN,
    default=Path("report.html"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--number",
    type=click.IntRange(min=1),
    metavar="N",
    help="The rollout with this number in 'rollout history'; 1 is the latest that has ended.  "
    "[default: the latest one, which may be running]",
)
def report(model: str, url: str, output: Path, number: int | None) -> None:
    """Write an HTML page about a rollout of MODEL: shares, criteria, and examples."""
    if not _MODEL.match(model):
        raise UsageError(f"'{model}' is not a valid model name")
    try:
        from modelport.loadtests.report import html
    except ModuleNotFoundError as error:
        raise UsageError(f"the report needs {error.name}; {install_extra('load')}") from error
    client, path = AdminClient(url), f"/v2/rollouts/{model}"
    latest = client.get(path)
    state = latest if number is None else _ended(client.get(f"{path}/history"), model, number)
    examples = []
    if state["plan"]["id"] == latest["plan"]["id"]:  # those of others are forgotten
        with contextlib.suppress(ModelportError):
            examples = client.get(f"{path}/examples")
    html.write_rollout(state, examples, output)
    click.echo(f"wrote {output}")


def _ended(history: list[Any], model: str, number: int) -> Any:
    if number > len(history):
        raise UsageError(
            f"--number {number}: {len(history)} rollouts of '{model}' have ended; see "
            "'modelport rollout history'"
        )
    return history[number - 1]
