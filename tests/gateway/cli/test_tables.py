"""Tables and colours on terminals that cannot, or must not, show them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner

from modelport import cli
from modelport.gateway.settings import LogFormat
from modelport.gateway.telemetry import logs
from tests.test_layers import modules

_WITHOUT = [{"NO_COLOR": "1"}, {"TERM": "dumb"}]


@pytest.mark.parametrize("environment", [{"NO_COLOR": "", "TERM": "xterm"}, *_WITHOUT])
def test_tables_have_no_colours_where_the_user_asks_for_none(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The first environment is the known-bad variant: the same terminal with colours."""
    file = str(tmp_path / "keys.toml")
    runner = CliRunner(env=environment)
    arguments = ["key", "create", "--name", "ci", "--file", file]
    assert runner.invoke(cli.modelport, arguments).exit_code == 0
    done = runner.invoke(cli.modelport, ["key", "list", "--file", file], color=True)
    assert done.exit_code == 0, done.output
    assert ("\x1b" in done.output) == (environment not in _WITHOUT)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "", "TERM": "xterm"}, *_WITHOUT])
def test_the_log_has_no_colours_where_the_user_asks_for_none(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    renderers = []
    monkeypatch.setattr(structlog, "configure", lambda **given: renderers.append(given))
    monkeypatch.setattr(logs.logging, "basicConfig", lambda **_: None)
    logs.configure_logging(LogFormat.DEFAULT, 0)
    text = renderers[0]["processors"][-1](None, "info", {"event": "ready", "level": "info"})
    assert ("\x1b" in text) == (environment not in _WITHOUT)


def test_rich_decides_by_the_environment_everywhere() -> None:
    """Rich obeys NO_COLOR and TERM=dumb, unless a console is made with other instructions."""
    found = 0
    for package in ("exporters", "gateway", "loadtests", "modelport"):
        for path in modules(package).values():
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if "Console(" in text else ():
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "Console":
                    found += 1
                    given = {each.arg for each in node.keywords}
                    assert not given & {"color_system", "no_color", "force_terminal"}, path
    assert found > 3
