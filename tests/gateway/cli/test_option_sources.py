"""Options from the environment and from a configuration file."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from modelport import cli
from modelport.gateway.cli import serve
from modelport.gateway.errors import suggestion
from modelport.gateway.server import app
from modelport.gateway.settings import Settings


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    seen: list[Settings] = []
    monkeypatch.setattr(app, "run", seen.append)
    return seen


def call(*arguments: str) -> None:
    cli.modelport(list(arguments), prog_name="modelport", standalone_mode=False)


def refused(*arguments: str) -> str:
    with pytest.raises(click.ClickException) as caught:
        call(*arguments)
    return caught.value.format_message()


def config(folder: Path, text: str) -> str:
    file = folder / "options.toml"
    file.write_text(text)
    return str(file)


def test_a_file_sets_options_by_their_flags(settings: list[Settings], tmp_path: Path) -> None:
    file = config(
        tmp_path,
        f'[serve]\nmodel-repository = ["{tmp_path}"]\nhttp-port = 9000\nrequire-manifest = true\n'
        'repository-poll-secs = 2.5\nmodel-control-mode = "explicit"\nload-model = ["a", "b"]\n',
    )
    call("--config", file, "serve")
    [found] = settings
    assert found.model_repositories == (tmp_path,)
    assert (found.http_port, found.require_manifest) == (9000, True)
    assert (found.repository_poll_seconds, found.load_models) == (2.5, ("a", "b"))


def test_the_environment_wins_over_the_file_and_the_command_line_over_both(
    settings: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config(tmp_path, "[serve]\nhttp-port = 1\ngrpc-port = 2\nmetrics-port = 3\n")
    monkeypatch.setenv("MODELPORT_CONFIG", file)
    monkeypatch.setenv("MODELPORT_SERVE_GRPC_PORT", "20")
    monkeypatch.setenv("MODELPORT_SERVE_METRICS_PORT", "30")
    call("serve", "--model-repository", str(tmp_path), "--metrics-port", "300")
    [found] = settings
    assert (found.http_port, found.grpc_port, found.metrics_port) == (1, 20, 300)


def test_a_worker_parses_what_the_file_said_when_its_parent_read_it(
    settings: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        f'[serve]\nhttp-port = 9000\nload-model = ["a", "b"]\nmodel-repository = "{tmp_path}"\n'
        'model-control-mode = "explicit"\nrequire-manifest = true\nstrict-readiness = false\n'
    )
    file = config(tmp_path, text)
    remembered: list[tuple[str, ...]] = []
    parse = serve.Serve.parse_args

    def remember(self: serve.Serve, ctx: click.Context, args: list[str]) -> list[str]:
        rest = parse(self, ctx, args)
        remembered.append(ctx.meta[serve.Serve.ARGUMENTS])
        return rest

    monkeypatch.setattr(serve.Serve, "parse_args", remember)
    call("--config", file, "serve", "--grpc-port", "7")
    Path(file).write_text("")
    assert serve.settings_of(remembered[0]) == settings[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve]\nhttp-prt = 1\n", ["'http-prt'", "did you mean 'http-port'?"]),
        ("[srve]\nhttp-port = 1\n", ["'srve'", "did you mean 'serve'?"]),
        ("http-port = 1\n", ["'http-port'", "the table of its command"]),
        ("[serve]\nhttp-port = 70000\n", ["--http-port", "It is set in the configuration file."]),
        ("[serve]\nhttp-port = 1.5\n", ["--http-port", "1.5"]),
        ("[serve]\nhttp-port = {a = 1}\n", ["[serve] http-port", "a string, a number"]),
        ("[serve]\nhttp-port = [1]\n", ["[serve] http-port"]),
        ("[serve\n", ["cannot be read"]),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refused("--config", config(tmp_path, text), "serve")
    assert all(word in message for word in words), message


def test_a_mistake_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELPORT_SERVE_HTTP_PORT", "x")
    assert "It is set by MODELPORT_SERVE_HTTP_PORT." in refused("serve")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "absent.toml' cannot be read" in refused("--config", f"{tmp_path}/absent.toml", "serve")


def test_every_option_of_every_verb_has_a_variable_of_its_own() -> None:
    context = click.Context(cli.modelport)
    variables = [
        option.envvar
        for verb in cli.COMMANDS
        for command in _leaves(cli.modelport.get_command(context, verb))
        for option in command.params
        if isinstance(option, click.Option) and option.expose_value
    ]
    assert "MODELPORT_SERVE_MODEL_REPOSITORY" in variables
    assert "MODELPORT_EXPORT_FORMAT" in variables
    assert all(variables)
    assert len(set(map(str, variables))) == len(variables)


def _leaves(command: click.Command | None) -> list[click.Command]:
    assert command is not None
    if isinstance(command, click.Group):
        return [leaf for each in command.commands.values() for leaf in _leaves(each)]
    return [command]


def test_a_mistyped_verb_is_answered_with_the_closest() -> None:
    assert "Did you mean 'serve'?" in refused("srve")
    assert suggestion("frud", ["fraud", "vit"], "; ") == "; did you mean 'fraud'?"
    assert suggestion("zebra", ["fraud", "vit"], "; ") == ""
