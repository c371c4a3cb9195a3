"""The command ``modelport``. Subcommands are imported when they run: ``--help`` stays fast."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import click
from click.exceptions import NoSuchCommand

from exporters.errors import OneLineCommand
from gateway import __version__, option_sources

#: name → where the command is, and the line that ``modelport --help`` shows.
COMMANDS = {
    "demo": ("exporters.demo:demo", "Train, export, serve and call two small models."),
    "export": ("exporters.cli:export", "Export a checkpoint, prove it, publish it."),
    "verify": ("exporters.verify_cli:verify", "Check a published version, or prove it again."),
    "publish": ("exporters.publish_cli:publish_command", "Publish a proven version once more."),
    "keygen": ("exporters.keygen_cli:keygen", "Make a pair of keys to sign exports with."),
    "convert": ("exporters.convert_cli:convert", "Convert weights between Keras and PyTorch."),
    "inspect": ("exporters.inspect_cli:inspect", "Show what is in an artifact, of any format."),
    "compare": ("loadtests.compare.cli:compare", "Compare formats and backends on this machine."),
    "sample": ("exporters.sample_cli:sample", "Write requests and their answers for load tests."),
    "migrate": ("exporters.migrate_cli:migrate", "Move models from another server over here."),
    "package": ("exporters.package_cli:package_command", "Package models for other servers."),
    "gate": ("loadtests.gate.cli:gate", "Decide whether a candidate may replace a baseline."),
    "serve": ("gateway.serve_cli:serve", "Serve a model repository over HTTP and gRPC."),
    "loadtest": ("loadtests.loadtest_cli:loadtest", "Put a load on a model server, and judge it."),
    "doctor": ("gateway.doctor:doctor", "Tell which backends this machine can run."),
    "models": ("gateway.client:models", "List the models of a running gateway."),
    "infer": ("gateway.client:infer", "Send a file to a model of a running gateway."),
    "load": ("gateway.control_cli:load", "Load or reload a model of a running gateway."),
    "unload": ("gateway.control_cli:unload", "Unload a model of a running gateway."),
    "label": ("gateway.versions_cli:label", "Name a version of a model in a repository."),
    "rollback": ("gateway.versions_cli:rollback", "Go back to an earlier version of a model."),
}


class LazyGroup(OneLineCommand, click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        option_sources.name_variables(command, f"MODELPORT_{cmd_name.upper()}")
        if ctx.default_map and cmd_name in ctx.default_map:
            table = ctx.default_map[cmd_name]
            ctx.default_map[cmd_name] = option_sources.defaults_for(command, table, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in COMMANDS:
            raise NoSuchCommand(args[0], possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _read_config(ctx: click.Context, param: click.Parameter, file: Path | None) -> None:
    if file is not None:
        ctx.default_map = option_sources.read(file)
        option_sources.check_verbs(ctx.default_map, COMMANDS)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="modelport")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    envvar="MODELPORT_CONFIG",
    callback=_read_config,
    expose_value=False,
    help="Options of the verbs, in TOML: a table for each verb.  [env: MODELPORT_CONFIG]",
)
def modelport() -> None:
    """Export a trained model once, prove it, serve it behind the Open Inference Protocol.

    Every option can also be set in the environment, as MODELPORT_SERVE_HTTP_PORT=9000 for
    --http-port of serve, or in the --config file, as http-port = 9000 under [serve].
    """


def main() -> None:
    """Run the command; errors are one line and an exit status, never a traceback."""
    _open_standard_streams()
    modelport(prog_name="modelport")


def _open_standard_streams() -> None:
    """Those that the caller closed: else a socket would take their number, and be written logs."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, number)
            if nothing != number:
                os.close(nothing)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


if __name__ == "__main__":
    main()
