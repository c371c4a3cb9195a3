"""Names of options: one meaning in all commands, and the same name in Python."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator

import click
import pytest

from modelport import cli
from modelport.exporters import api
from modelport.exporters.options import (
    IMAGE_FLAGS,
    ConvertOptions,
    ExportOptions,
    VerifyOptions,
)
from modelport.gateway.cli.option_sources import flag_of
from tests.commands import modelport

#: Presentation on a terminal, and what Python has in its place.
TERMINAL, PYTHON = {"json", "quiet"}, {"progress", "image"}
OPTIONS = {
    "export": ExportOptions,
    "certify": ExportOptions,
    "verify": VerifyOptions,
    "convert": ConvertOptions,
}


def commands(
    group: click.Group = cli.modelport, before: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*before, name))
        else:
            yield (*before, name), command


def meaning(option: click.Option) -> str:
    """The kind of an option's value: a flag, a file, a number, or a word."""
    if option.is_flag:
        return "flag"
    kind = option.type
    if isinstance(kind, click.Path) or option.metavar == "PREFIX":
        return "path"
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return "number"
    return "text"


def contradictions(options: list[tuple[str, click.Option]]) -> dict[str, set[str]]:
    """Flag → its different meanings."""
    found: dict[str, set[str]] = defaultdict(set)
    for _, option in options:
        for flag in (*option.opts, *option.secondary_opts):
            found[flag].add(meaning(option) if flag.startswith("--") else flag_of(option))
    return {flag: kinds for flag, kinds in found.items() if len(kinds) > 1}


def options() -> list[tuple[str, click.Option]]:
    return [
        (" ".join(name), option)
        for name, command in commands()
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden
    ]


#: A number, where it can be neither ``auto`` nor a label; a version, or earlier records.
ALLOWED = {"--model-version", "--baseline"}


def test_an_option_has_one_meaning_in_all_commands() -> None:
    found = contradictions(options())
    assert not found.keys() - ALLOWED, found
    known_bad = click.Option(["--json"], type=click.Path())
    assert "--json" in contradictions([*options(), ("gate", known_bad)])


@pytest.mark.parametrize("name", ["export", "certify", "verify", "convert"])
def test_a_command_and_its_function_have_the_same_names(name: str) -> None:
    command = cli.modelport.get_command(click.Context(cli.modelport), name)
    assert command is not None
    flags = {flag_of(option).replace("-", "_") for option in command.params}
    flags -= {f"image_{each}" for each in IMAGE_FLAGS} | TERMINAL
    declared = OPTIONS[name].__annotations__.keys() - PYTHON
    parameters = (inspect.signature(getattr(api, name)).parameters.keys() | declared) - {"options"}
    if name == "certify":
        assert flags - {"artifact"} <= parameters
    else:
        assert flags == parameters


def test_an_old_name_is_an_error_with_the_new_one() -> None:
    tried = 0
    for name, command in commands():
        for option in command.params:
            if not isinstance(option, click.Option) or not option.hidden:
                continue
            required = [
                word
                for each in command.params
                if each.required
                for word in ([] if isinstance(each, click.Argument) else [each.opts[0], "1"])
            ]
            done = modelport(*name, option.opts[0], "x", *required)
            assert done.returncode == 2
            assert done.stderr.startswith(f"modelport: error: {option.opts[0]} is --"), done.stderr
            tried += 1
    assert tried > 10
