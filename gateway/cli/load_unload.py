"""``modelport load`` and ``modelport unload``: control the models of a running gateway."""

from __future__ import annotations

import json
from pathlib import Path

import click

from modelport.client import Client
from modelport.gateway.cli.infer import connect, protocol_option, url_option
from modelport.gateway.cli.paths import EXISTING
from modelport.gateway.errors import InvalidArgument, ModelportError
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import untrusted_files


@click.command()
@click.argument("model")
@url_option
@protocol_option
@click.option(
    "--model-config",
    type=EXISTING,
    metavar="FILE",
    help="Configuration in place of the repository's: config.pbtxt or JSON.",
)
def load(model: str, url: str | None, protocol: str, model_config: Path | None) -> None:
    """Load or reload MODEL and show its versions.

    The gateway must run with --model-control-mode explicit.
    """
    config = "" if model_config is None else _read_config(model_config)
    with connect(protocol, url) as client:
        client.load(model, config=config)
        _show(client, model)


@click.command()
@click.argument("model")
@url_option
@protocol_option
@click.option(
    "--unload-dependents", is_flag=True, help="Also unload the models of an ensemble's steps."
)
def unload(model: str, url: str | None, protocol: str, unload_dependents: bool) -> None:
    """Unload MODEL after its requests in flight.

    The gateway must run with --model-control-mode explicit.
    """
    with connect(protocol, url) as client:
        client.unload(model, dependents=unload_dependents)
        _show(client, model)


def _read_config(file: Path) -> str:
    """Convert the configuration in ``file`` to the JSON of a load request."""
    try:
        text = untrusted_files.read_text(file, untrusted_files.MAX_CONFIG_BYTES)
        json_like = text.lstrip().startswith("{")
        config = configuration.parse_json(text) if json_like else configuration.parse(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"'{file}' cannot be read: {reason}") from error
    except ModelportError as error:
        raise InvalidArgument(f"'{file}': {error}") from error
    return json.dumps(configuration.to_json(config))


def _show(client: Client, model: str) -> None:
    for status in client.models():
        if status.name == model and status.version:
            reason = f": {status.reason}" if status.reason else ""
            click.echo(f"{model} version {status.version} is {status.state}{reason}")
