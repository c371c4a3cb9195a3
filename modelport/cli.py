"""The command ``modelport``. Subcommands are imported when they run: ``--help`` stays fast."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from pathlib import Path

import click
from click.exceptions import NoSuchCommand
from click.shell_completion import CompletionItem

from modelport import __version__
from modelport.gateway.cli import option_sources
from modelport.gateway.cli.errors import OneLineCommand
from modelport.gateway.runtime import collector, terminal

#: name → where the command is, and the line that ``modelport --help`` shows.
COMMANDS = {
    "demo": (
        "modelport.exporters.cli.demo:demo",
        "Train, export, serve and call two small models.",
    ),
    "export": (
        "modelport.exporters.cli.export:export",
        "Export a checkpoint, verify it, and publish it.",
    ),
    "certify": (
        "modelport.exporters.cli.certify:certify",
        "Verify and publish an ONNX file of another tool.",
    ),
    "verify": (
        "modelport.exporters.cli.verify:verify",
        "Verify a published version again.",
    ),
    "publish": (
        "modelport.exporters.cli.publish:publish_command",
        "Copy a published version to another repository.",
    ),
    "install": (
        "modelport.exporters.cli.install:install",
        "Install what the lock files of Python models pin.",
    ),
    "keygen": (
        "modelport.exporters.cli.keygen:keygen",
        "Make a key pair to sign exports.",
    ),
    "convert": (
        "modelport.exporters.cli.convert:convert",
        "Convert weights between Keras and PyTorch.",
    ),
    "inspect": (
        "modelport.exporters.cli.inspect:inspect",
        "Show what is in an artifact, of any format.",
    ),
    "compare": (
        "modelport.loadtests.cli.compare:compare",
        "Compare formats and backends on this machine.",
    ),
    "check": (
        "modelport.gateway.cli.check:check",
        "Run the models of a Python file in this process.",
    ),
    "sample": (
        "modelport.exporters.cli.sample:sample",
        "Write requests and their answers for load tests.",
    ),
    "migrate": (
        "modelport.exporters.cli.migrate:migrate",
        "Import models from another server.",
    ),
    "package": (
        "modelport.exporters.cli.package:package_command",
        "Package models for other servers.",
    ),
    "gate": (
        "modelport.loadtests.cli.gate:gate",
        "Decide whether a candidate may replace a baseline.",
    ),
    "serve": ("modelport.gateway.cli.serve:serve", "Serve a model repository over HTTP and gRPC."),
    "loadtest": (
        "modelport.loadtests.cli.loadtest:loadtest",
        "Measure a model server under load.",
    ),
    "key": (
        "modelport.gateway.cli.key:key",
        "Make, list, replace and revoke API keys.",
    ),
    "records": (
        "modelport.gateway.cli.records:records",
        "List recorded traffic, and delete what is old.",
    ),
    "replay": (
        "modelport.loadtests.cli.replay:replay",
        "Send recorded traffic again, and compare the answers.",
    ),
    "drift": (
        "modelport.loadtests.cli.drift:drift",
        "Compare recorded traffic with a baseline.",
    ),
    "doctor": (
        "modelport.gateway.cli.doctor:doctor",
        "Show what this machine can run.",
    ),
    "top": (
        "modelport.gateway.cli.top:top",
        "Watch the models of a running gateway on a terminal.",
    ),
    "models": ("modelport.gateway.cli.infer:models", "List the models of a running gateway."),
    "infer": ("modelport.gateway.cli.infer:infer", "Send a file to a model of a running gateway."),
    "predict": (
        "modelport.gateway.cli.predict:predict",
        "Run a file of rows through a model.",
    ),
    "load": (
        "modelport.gateway.cli.load_unload:load",
        "Load or reload a model of a running gateway.",
    ),
    "unload": ("modelport.gateway.cli.load_unload:unload", "Unload a model of a running gateway."),
    "label": (
        "modelport.gateway.cli.label_rollback:label",
        "Give a version of a model a label.",
    ),
    "rollback": (
        "modelport.gateway.cli.label_rollback:rollback",
        "Go back to an earlier version of a model.",
    ),
    "access": (
        "modelport.gateway.cli.access:access",
        "Explain what the rules of access.toml allow.",
    ),
    "rollout": (
        "modelport.gateway.cli.rollout:rollout",
        "Replace a version in stages, or roll it back.",
    ),
}

#: Commands by task, in the order of ``modelport --help``.
TASKS = {
    "Start": ("demo", "doctor"),
    "Export and prove": (
        *("export", "certify", "verify", "check", "inspect", "sample", "convert"),
        *("publish", "install", "keygen", "package", "migrate"),
    ),
    "Serve": ("serve", "key", "access"),
    "Use a running gateway": ("models", "top", "infer", "predict", "load", "unload"),
    "Choose versions": ("label", "rollback", "rollout"),
    "Measure and compare": ("loadtest", "compare", "gate", "records", "replay", "drift"),
}
#: Subcommands from a higher layer than their command's.
SUBCOMMANDS = {"rollout": {"report": "modelport.loadtests.cli.rollout_report:report"}}
#: Start of the places of the exporters' commands.
_EXPORTERS = "modelport.exporters."


class LazyGroup(OneLineCommand, click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands, in the order of ``--help``."""
        return list(itertools.chain.from_iterable(TASKS.values()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command and apply its defaults; None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        place = COMMANDS[cmd_name][0]
        if place.startswith(_EXPORTERS):
            # Otherwise torch's threads wait for each other by spinning. On a busy machine, or in a
            # container with a quota, that costs many times the processor time of the work itself.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        command = _imported(place)
        if isinstance(command, click.Group):
            for name, place in SUBCOMMANDS.get(cmd_name, {}).items():
                command.add_command(_imported(place), name)
        option_sources.name_variables(command, f"MODELPORT_{cmd_name.upper()}")
        if ctx.default_map and cmd_name in ctx.default_map:
            table = ctx.default_map[cmd_name]
            ctx.default_map[cmd_name] = option_sources.defaults_for(command, table, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of ``args``; the error for an unknown one suggests similar names."""
        if not args[0].startswith("-") and args[0] not in COMMANDS:
            raise NoSuchCommand(args[0], possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by task, without importing them."""
        width = max(map(len, COMMANDS))
        for task, names in TASKS.items():
            with formatter.section(task):
                formatter.write_dl([(name.ljust(width), COMMANDS[name][1]) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command without importing any."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=COMMANDS[name][1]) for name in names]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]


def _imported(place: str) -> click.Command:
    module, _, attribute = place.partition(":")
    with collector.paused():
        command: click.Command = getattr(importlib.import_module(module), attribute)
    return command


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
    help="Options in TOML, with a table for each command.  [env: MODELPORT_CONFIG]",
)
@click.pass_context
def modelport(context: click.Context) -> None:
    """Export a trained model, prove that it computes what its checkpoint does, and serve it.

    Every option can also be set in the environment, as MODELPORT_SERVE_HTTP_PORT=9000 for
    --http-port of serve, or in the --config file, as http-port = 9000 under [serve].

    Tab completion in bash: eval "$(_MODELPORT_COMPLETE=bash_source modelport)"; zsh and fish alike.
    """
    if terminal.is_plain():
        context.color = False  # of every command


def main() -> None:
    """Run the command; errors are one line and an exit status, never a traceback."""
    _open_standard_streams()
    modelport(prog_name="modelport")


def _open_standard_streams() -> None:
    """Open closed standard streams; a socket would take their numbers, and get the logs."""
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
