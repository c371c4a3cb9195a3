"""Command-line options from the environment and from a configuration file.

Every option of every command can be set in three places. The first of these wins:

    modelport serve --http-port 9000       the command line
    MODELPORT_SERVE_HTTP_PORT=9000         the environment
    [serve]                                the TOML file named by --config or MODELPORT_CONFIG
    http-port = 9000

A repeatable option is a list in the file, and separated by spaces in the environment (folders and
files by colons, as in ``PATH``).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from modelport.gateway.errors import suggestion
from modelport.gateway.repository import untrusted_files

MAX_FILE_BYTES = 1024 * 1024
EPILOG = (
    "Every option can also be set in the environment ({example}) or in a TOML file (modelport "
    "--config FILE)."
)


def flag_of(option: click.Parameter) -> str:
    """The option's first long flag without dashes: ``http-port``."""
    return next((f for f in option.opts if f.startswith("--")), option.opts[0]).lstrip("-")


def name_variables(command: click.Command, prefix: str) -> None:
    """Set every option of ``command`` and its subcommands from a variable ``PREFIX_FLAG``."""
    for option in _options(command):
        if option.envvar is None and (option.expose_value or option.hidden):
            option.envvar = f"{prefix}_{_constant(flag_of(option))}"
    if isinstance(command, click.Group):
        for name, subcommand in command.commands.items():
            name_variables(subcommand, f"{prefix}_{_constant(name)}")
    elif not command.epilog and (options := [o for o in _options(command) if o.expose_value]):
        option = options[0]
        command.epilog = EPILOG.format(example=f"{option.envvar} for --{flag_of(option)}")


def read(file: Path) -> dict[str, Any]:
    """Read the tables of a configuration file, by command.

    Raises:
        click.UsageError: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(untrusted_files.read_text(file, MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise click.UsageError(f"--config '{file}' cannot be read: {reason}") from error


def check_verbs(tables: Mapping[str, Any], verbs: Iterable[str]) -> None:
    """Raise ``click.UsageError`` if a table of a configuration file belongs to no command."""
    verbs = list(verbs)
    for name, table in tables.items():
        if name not in verbs or not isinstance(table, dict):
            raise click.UsageError(
                f"the configuration file has an unknown table or option '{name}'; every option "
                f"belongs in the table of its command, such as [serve]"
                + suggestion(name, verbs, "; ")
            )


def defaults_for(command: click.Command, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert ``table`` to click's ``default_map``: parameter names, command-line values.

    Raises:
        click.UsageError: an unknown option or an invalid value; the message has ``where``.
    """
    flags = {flag.lstrip("-"): o for o in _options(command) for flag in o.opts}
    groups = command.commands if isinstance(command, click.Group) else {}
    defaults: dict[str, Any] = {}
    for key, value in table.items():
        if key in groups and isinstance(value, dict):
            defaults[key] = defaults_for(groups[key], value, f"{where}.{key}")
        elif key in flags and flags[key].expose_value:
            defaults[str(flags[key].name)] = _text(flags[key], value, f"[{where}] {key}")
        else:
            known = sorted({flag_of(option) for option in flags.values()} | set(groups))
            raise click.UsageError(
                f"the configuration file's table [{where}] has '{key}', which is not an option of "
                f"'modelport {where.replace('.', ' ')}'{suggestion(key, known, '; ')}"
            )
    return defaults


def as_arguments(ctx: click.Context) -> tuple[str, ...]:
    """The options that ``ctx`` took from a configuration file, as command-line arguments."""
    arguments: list[str] = []
    for option in _options(ctx.command):
        if ctx.get_parameter_source(str(option.name)) is not ParameterSource.DEFAULT_MAP:
            continue
        value = (ctx.default_map or {})[option.name]
        for each in value if isinstance(value, list) else [value]:
            if not option.is_flag:
                arguments.append(f"--{flag_of(option)}={each}")
            elif each == "true":
                arguments.append(f"--{flag_of(option)}")
            elif option.secondary_opts:
                arguments.append(option.secondary_opts[0])
    return tuple(arguments)


def _options(command: click.Command) -> list[click.Option]:
    return [p for p in command.params if isinstance(p, click.Option)]


def _constant(name: str) -> str:
    return name.replace("-", "_").upper()


def _text(option: click.Option, value: Any, where: str) -> str | list[str]:
    if isinstance(value, list) and option.multiple:
        return [_scalar(each, where) for each in value]
    text = _scalar(value, where)
    return [text] if option.multiple else text


def _scalar(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise click.UsageError(
        f"the configuration file's {where} must be a string, a number or true or false, or a list "
        "of them for a repeatable option"
    )
