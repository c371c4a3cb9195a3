"""The command line: Triton's flags, one line for every mistake, and help for everything."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import BashComplete

from modelport import __version__, cli
from modelport.gateway.cli import serve
from modelport.gateway.server import app
from modelport.gateway.settings import AspiredVersionPolicy, LogFormat, ModelControlMode, Settings
from tests import models
from tests.commands import modelport
from tests.thorough import sampled

#: Triton's flag, and its default (``tritonserver --help``, 25.x) where we have the same.
TRITON = {
    "--model-control-mode": "none",
    "--repository-poll-secs": 15.0,
    "--model-load-retry-count": 0,
    "--strict-readiness": True,
    "--http-port": 8000,
    "--http-max-input-size": 2**26,
    "--grpc-port": 8001,
    "--metrics-port": 8002,
    "--exit-timeout-secs": 30.0,
    "--log-format": "default",
    "--log-verbose": 0,
}
#: Triton's flags whose default differs on purpose: loopback, and one bad model ends nothing.
OURS = {
    "--http-address": "127.0.0.1",
    "--grpc-address": "127.0.0.1",
    "--metrics-address": "127.0.0.1",
    "--exit-on-error": False,
}
COMMANDS = [
    name
    for name, (where, _) in cli.COMMANDS.items()
    if importlib.util.find_spec(where.partition(":")[0]) is not None
]


def program(*arguments: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "modelport", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def one_line(run: subprocess.CompletedProcess[str], status: int) -> str:
    """The message, when the run failed as it should: one line, no traceback, this status."""
    assert run.returncode == status, run.stderr
    assert run.stdout == ""
    lines = run.stderr.splitlines()
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("modelport: error: ")
    return lines[0].removeprefix("modelport: error: ")


def options() -> dict[str, click.Option]:
    return {
        flag: parameter
        for parameter in serve.serve.params
        if isinstance(parameter, click.Option)
        for flag in parameter.opts
    }


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings that the command would have served with."""
    seen: list[Settings] = []
    monkeypatch.setattr(app, "run", seen.append)
    return seen


def call(*arguments: str) -> None:
    cli.modelport(list(arguments), prog_name="modelport", standalone_mode=False)


# -- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flag", "default"), [*TRITON.items(), *OURS.items()])
def test_a_flag_has_its_default(flag: str, default: Any) -> None:
    assert options()[flag].get_default(click.Context(serve.serve)) == default


def test_repositories_and_models_to_load_are_repeatable() -> None:
    for flag in ("--model-repository", "--model-store", "--load-model"):
        assert options()[flag].multiple


def test_without_flags_the_settings_are_the_dataclasss_own(
    settings: list[Settings], tmp_path: Path
) -> None:
    call("serve", "--model-repository", str(tmp_path))
    assert settings == [Settings((tmp_path,))]


def test_flags_are_read_as_triton_reads_them(settings: list[Settings], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    call(
        "serve",
        f"--model-repository={tmp_path}",
        f"--model-store={other}",
        "--model-control-mode=explicit",
        "--load-model=a",
        "--load-model=b",
        "--strict-readiness=false",
        "--exit-on-error=true",
        "--log-verbose=1",
        "--log-format=json",
        "--http-port=0",
        "--repository-poll-secs=0.5",
        "--exit-timeout-secs=0",
        "--require-manifest",
        "--aspired-version-policy=resource_preserving",
        "--model-load-retry-count=5",
        "--load-retry-interval-secs=60",
    )
    assert settings == [
        Settings(
            (tmp_path, other),
            ModelControlMode.EXPLICIT,
            ("a", "b"),
            0.5,
            require_manifest=True,
            aspired_version_policy=AspiredVersionPolicy.RESOURCE_PRESERVING,
            model_load_retry_count=5,
            load_retry_interval_seconds=60.0,
            strict_readiness=False,
            exit_on_error=True,
            http_port=0,
            exit_timeout_seconds=0.0,
            log_format=LogFormat.JSON,
            log_verbose=1,
        )
    ]


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["serve", "--nonsense"], "--nonsense"),
        (["serve"], "--model-repository"),
        (["serve", "--model-repository"], "--model-repository"),
        (["serve", "--model-repository", "{here}", "extra"], "extra"),
        (["serve", "--model-repository", "{here}", "--http-port", "65536"], "--http-port"),
        (["serve", "--model-repository", "{here}", "--grpc-port", "-1"], "--grpc-port"),
        (["serve", "--model-repository", "{here}", "--metrics-port", "http"], "--metrics-port"),
        (["serve", "--model-repository", "{here}", "--model-control-mode", "x"], "explicit"),
        (["serve", "--model-repository", "{here}", "--log-format", "xml"], "ISO8601"),
        (["serve", "--model-repository", "{here}", "--log-verbose", "-1"], "--log-verbose"),
        (["serve", "--model-repository", "{here}", "--strict-readiness", "si"], "readiness"),
        (["serve", "--model-repository", "{here}", "--repository-poll-secs", "0"], "poll-secs"),
        (["serve", "--model-repository", "{here}", "--repository-poll-secs", "nan"], "poll-secs"),
        (["serve", "--model-repository", "{here}", "--exit-timeout-secs", "-1"], "exit-timeout"),
        (["serve", "--model-repository", "{here}", "--exit-timeout-secs", "inf"], "exit-timeout"),
        (["serve", "--model-repository", "{here}", "--http-max-input-size", "0"], "input-size"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(
    arguments: list[str], mentions: str, tmp_path: Path
) -> None:
    run = modelport(*(argument.format(here=tmp_path) for argument in arguments))
    assert mentions in one_line(run, 2)


def test_a_repository_that_is_not_there_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    message = one_line(modelport("serve", "--model-repository", str(tmp_path / "nowhere")), 2)
    assert "nowhere' is not a folder" in message
    assert "modelport demo" in message


def test_a_folder_with_the_file_of_a_model_alone_is_one_line_with_the_remedy(
    tmp_path: Path,
) -> None:
    models.multiply(tmp_path / "a" / "model.onnx")
    (tmp_path / "a" / "labels.txt").touch()
    message = one_line(modelport("serve", str(tmp_path / "a")), 2)
    assert f"serve its file: modelport serve {tmp_path}/a/model.onnx" in message


def test_a_repository_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = one_line(modelport("serve", "--model-repository", str(tmp_path / "file")), 2)
    assert "is not a folder" in message


@pytest.mark.parametrize("protocol", sampled(("http", "grpc", "metrics"), "grpc"))
def test_a_port_in_use_is_one_line_that_names_the_flag(protocol: str, tmp_path: Path) -> None:
    ports = dict.fromkeys(("http", "grpc", "metrics"), "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports[protocol] = str(port)
        flags = [part for name, p in ports.items() for part in (f"--{name}-port", p)]
        run = program("serve", "--model-repository", str(tmp_path), *flags)
    message = one_line(run, 1)
    assert message.startswith(f"cannot listen on 127.0.0.1:{port}")
    assert f"--{protocol}-port" in message


def test_the_same_port_for_two_protocols_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run = program(
        *("serve", "--model-repository", str(tmp_path), "--http-port", port),
        *("--grpc-port", port, "--metrics-port", "0"),
        timeout=60,
    )
    assert f"--http-port and --grpc-port are both {port}" in one_line(run, 2)


@pytest.mark.parametrize("protocol", sampled(("http", "grpc", "metrics"), "metrics"))
def test_an_address_of_another_machine_gets_a_one_line_error_that_names_the_flag(
    protocol: str, tmp_path: Path
) -> None:
    run = program(
        *("serve", "--model-repository", str(tmp_path)),
        *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
        *(f"--{protocol}-address", "192.0.2.1", "--insecure"),
    )
    message = one_line(run, 1)
    assert "cannot listen on 192.0.2.1:0" in message
    assert f"--{protocol}-address" in message


def test_a_model_that_does_not_load_ends_the_command_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    models.repository(tmp_path)
    (tmp_path / "x2" / "1" / "model.onnx").write_bytes(b"")
    run = program(
        *("serve", "--model-repository", str(tmp_path), "--exit-on-error", "true"),
        *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
    )
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("modelport: error: failed to load all models: x2 (")
    assert "Traceback" not in run.stderr


# -- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command_with_a_line(flag: str) -> None:
    run = modelport(flag)
    assert (run.returncode, run.stderr) == (0, "")
    for name, (_, text) in cli.COMMANDS.items():
        assert re.search(rf"^ +{name} +{re.escape(text[:20])}", run.stdout, re.MULTILINE)


def test_without_arguments_the_help_is_shown_as_help() -> None:
    run = program()
    text = run.stdout + run.stderr
    assert re.search(r"^Export and prove:$", text, re.MULTILINE), text
    assert "modelport: error" not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    run = modelport(command, "--help")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"Usage: modelport {command} ")


def test_the_help_of_serve_has_every_flag() -> None:
    text = modelport("serve", "--help").stdout
    for flag in (*TRITON, *OURS, "--model-repository", "--load-model", "--require-manifest"):
        assert flag in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_flag_is_one_line_in_every_command(command: str) -> None:
    assert "--nonsense" in one_line(modelport(command, "--nonsense"), 2)


def test_the_version_is_printed() -> None:
    run = program("--version")
    assert (run.returncode, run.stdout) == (0, f"modelport, version {__version__}\n")


def test_every_command_that_is_listed_exists() -> None:
    assert list(cli.COMMANDS) == COMMANDS


def test_every_command_belongs_to_one_task_of_the_help() -> None:
    assert sorted(chain(*cli.TASKS.values())) == sorted(COMMANDS)
    text = modelport("--help").stdout
    places = [text.index(f"\n{task}:\n") for task in cli.TASKS]
    assert places == sorted(places)


def test_tab_completion_imports_only_the_command_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    completion = BashComplete(cli.modelport, {}, "modelport", "_MODELPORT_COMPLETE")
    imported: list[str] = []
    real = cli._imported

    def note(place: str) -> click.Command:
        imported.append(place)
        return real(place)

    monkeypatch.setattr(cli, "_imported", note)

    def completed(*words: str) -> list[str]:
        return [item.value for item in completion.get_completions([*words[:-1]], words[-1])]

    assert completed("ro") == ["rollback", "rollout"]
    assert imported == []
    assert completed("serve", "--log-f") == ["--log-format"]
    assert completed("serve", "--log-format", "") == ["default", "ISO8601", "json"]
    [found] = completion.get_completions(["serve", "--model-repository"], "mod")
    assert found.type == "file"
    assert set(imported) == {cli.COMMANDS["serve"][0]}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model-config-name", "../x"], "'../x' is not the name of a file"),
        (["--model-config-name", "x", "--model-repository", "s3://bucket/a"], "no object storage"),
    ],
)
def test_a_name_of_configurations_that_has_no_effect_is_refused(
    tmp_path: Path, flags: list[str], told: str
) -> None:
    arguments = ["--model-repository", str(tmp_path)]
    assert serve.settings_of([*arguments, "--model-config-name", "gpu"]).model_config_name == "gpu"
    with pytest.raises(click.UsageError, match=told):
        serve.settings_of([*arguments, *flags])
