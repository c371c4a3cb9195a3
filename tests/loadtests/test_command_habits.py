"""Common behaviour of the commands of load tests and exporters: extras, logs, annotations."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from modelport.exporters.runtime import output_capture
from modelport.gateway.cli import errors
from modelport.gateway.cli.errors import Failure, OneLineCommand
from modelport.gateway.errors import UsageError
from modelport.gateway.runtime import progress
from modelport.gateway.runtime.progress import Heartbeat
from modelport.loadtests.checks import Check, CheckStatus
from modelport.loadtests.cli import compare as compare_cli
from modelport.loadtests.report import console
from modelport.loadtests.system import environments

ROOT = Path(__file__).parents[2]
#: Run every verb as if the packages of every extra were missing; print exit codes and errors.
BASE_INSTALL = """
import importlib.abc, json, sys
from click.testing import CliRunner
from modelport.gateway.extras import _LIBRARIES

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in _LIBRARIES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from modelport.cli import modelport
for name in ("f.pt", "f.onnx", "f.keras", "f.mar", "slo.toml"):
    open(name, "wb").close()
told = {}
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(modelport, arguments)
    told[" ".join(arguments)] = (done.exit_code, done.output)
print(json.dumps(told))
"""
VERBS = (
    ("loadtest", "127.0.0.1:1/m"),
    ("compare", "f.pt"),
    ("gate", "a", "b", "--slo", "slo.toml"),
    ("export", "f.pt", "--model", "fraud", "--format", "onnx"),
    ("sample", "f.pt", "--model", "fraud", "-o", "r.json"),
    ("convert", "f.keras", "g.pt", "--model", "fraud"),
    ("demo",),
)


def test_a_base_installation_says_in_every_verb_alike_which_extra_is_missing(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BASE_INSTALL, json.dumps(VERBS)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    for verb, (status, output) in json.loads(done.stdout).items():
        lines = output.strip().splitlines()
        assert (status, len(lines)) == (4, 1), (verb, output)
        assert "' is not installed; this needs it: pip install '.[" in lines[0], verb


def test_a_command_that_imports_something_missing_later_says_so_too() -> None:
    @click.command(cls=OneLineCommand)
    def verb() -> None:
        raise ModuleNotFoundError("No module named 'keras.src'", name="keras.src")

    done = CliRunner().invoke(verb, [])
    assert done.exit_code == 4
    assert "pip install '.[tensorflow]'" in done.output


def test_a_missing_module_of_the_users_own_is_no_missing_extra() -> None:
    @click.command(cls=OneLineCommand)
    def verb() -> None:
        raise ModuleNotFoundError("No module named 'mine'", name="mine")

    done = CliRunner().invoke(verb, [])
    assert done.exit_code == 1
    assert "No module named 'mine'" in done.output


def test_errors_are_annotated_in_github_actions_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = Failure(UsageError("50% of 'a' is\nwrong"))
    failure.show()
    assert capsys.readouterr().err == "modelport: error: 50% of 'a' is wrong\n"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    failure.show()
    assert capsys.readouterr().err.splitlines()[1] == (
        "::error title=modelport::50%25 of 'a' is wrong"
    )
    errors.annotate("two\nlines", "a: b")
    assert capsys.readouterr().err == "::error title=a%3A b::two%0Alines\n"


def test_long_work_logs_its_progress() -> None:
    told: list[str] = []
    spoke = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        spoke.set()

    with Heartbeat(tell, seconds=0.001) as heartbeat:
        heartbeat.text = "onnx: proving, 3 of 9"
        spoke.wait(60)
        spoke.clear()
        spoke.wait(60)
    assert told[-1].endswith(" s: onnx: proving, 3 of 9")
    assert not heartbeat._thread.is_alive()


def test_progress_in_a_log_is_a_line_now_and_then_even_while_converters_are_muted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.001)
    told = ""
    with progress.progress_bar() as show, output_capture.muted(), output_capture.quiet():
        show("proving", 1, 2)
        while "s: proving, 50%" not in told:
            told += capfd.readouterr().err


def test_progress_estimates_the_rest_of_a_stage_from_its_share_that_is_done() -> None:
    now = 100.0
    estimate = progress.Estimate(lambda: now)
    estimate.tell("loading", 0, 0)
    assert str(estimate) == "loading"
    now = 110.0
    estimate.tell("proving", 0, 400)
    assert str(estimate) == "proving, 0%"
    now = 120.0
    estimate.tell("proving", 100, 400)
    assert str(estimate) == "proving, 25%, about 30 s left"
    now = 125.0  # nothing new, but time goes by
    assert str(estimate) == "proving, 25%, about 25 s left"
    estimate.tell("proving", 400, 400)
    assert str(estimate) == "proving, 100%"
    estimate.tell("publishing", 0, 0)
    assert str(estimate) == "publishing"
    now = 1205.0
    assert str(estimate) == "publishing, 1080 s so far"
    estimate.tell("round 1 · a", 0, 10)
    now = 1215.0
    estimate.tell("round 1 · b", 5, 10)  # which is a part of the same work
    assert str(estimate) == "round 1 · b, 50%, about 10 s left"


def test_a_terminal_shows_that_a_stage_goes_on_which_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECOND", 0.001)
    monkeypatch.setattr(progress, "TOLD_SECONDS", 0.0)
    told = ""
    with progress._status_line() as show:
        show("converting, usually 55 s", 0, 0)
        while told.count("converting, usually 55 s, 0 s so far") < 3:
            told += capfd.readouterr().err
    assert capfd.readouterr().err.endswith(progress.CLEAR)


def test_nothing_is_said_of_the_progress_of_a_quiet_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.001)
    before = threading.active_count()
    with progress.progress_bar(quiet=True) as show:
        show("converting", 1, 2)
        assert threading.active_count() == before
    assert capfd.readouterr().err == ""


def test_a_table_in_a_pipe_keeps_every_reason_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    why = "the candidate " + "really " * 60 + "does not start"
    console.checks([Check("start", CheckStatus.FAIL, "", "", why)], console.standard())
    assert why in capsys.readouterr().out


def test_what_an_installed_package_caches_lies_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert environments.peers() == ROOT / ".peers"  # of a checkout
    monkeypatch.setattr(environments, "ROOT", tmp_path / "site-packages")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = environments.folder("env")
    assert made == tmp_path / "cache" / "modelport" / "peers" / "env"
    assert made.is_dir()
    assert not (tmp_path / "site-packages").exists()
    assert compare_cli._cache(None) == tmp_path / "cache" / "modelport" / "compare"
