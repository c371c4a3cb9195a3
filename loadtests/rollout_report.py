"""``modelport rollout report``: a page about a rollout of a running gateway."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import click

from modelport.gateway.cli.admin_client import DEFAULT_URL, AdminClient
from modelport.gateway.cli.errors import OneLineCommand, UsageError
from modelport.gateway.errors import ModelportError

_MODEL = re.compile(r"[\w.-]+\Z")


@click.command(cls=OneLineCommand)
@click.argument("model")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The gateway's metrics port.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="The file to write.",
)
def report(model: str, url: str, output: Path) -> None:
    """Write an HTML page about the latest rollout of MODEL: shares, criteria, and examples."""
    if not _MODEL.match(model):
        raise UsageError(f"'{model}' is not a valid model name")
    try:
        from modelport.loadtests.report import html
    except ModuleNotFoundError as error:
        raise UsageError(f"the report needs {error.name}; pip install 'modelport[load]'") from error
    client = AdminClient(url)
    state = client.get(f"/v2/rollouts/{model}")
    examples = []
    with contextlib.suppress(ModelportError):  # they are gone once the rollout has ended
        examples = client.get(f"/v2/rollouts/{model}/examples")
    html.write_rollout(state, examples, output)
    click.echo(f"wrote {output}")
