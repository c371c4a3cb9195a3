"""Envoy's configuration: Envoy takes it, and it says what it is said to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import Unavailable
from gateway.front.envoy import launch
from gateway.settings import Settings

BARE = "tests.front.bare:application"
SETTINGS = Settings((), http_port=18000, grpc_port=18001)


def refusal(folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """What Envoy has to say of a configuration; nothing where it takes it."""
    argv, variables = launch.command(SETTINGS, folder, BARE)
    written = folder / "envoy.json"
    document = json.loads(written.read_text())
    change(document)
    written.write_text(json.dumps(document))
    done = subprocess.run(
        [*argv, "--mode", "validate"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stderr if done.returncode else ""


def test_envoy_takes_the_configuration(tmp_path: Path) -> None:
    assert refusal(tmp_path, lambda _: None) == ""


def misspell(document: dict[str, Any]) -> None:
    document["static_resources"]["listeners"][0]["enable_reuse_prot"] = True


def test_the_check_sees_a_field_that_envoy_does_not_know(tmp_path: Path) -> None:
    assert "no such field" in " ".join(refusal(tmp_path, misspell).split())


def forget_the_module(document: dict[str, Any]) -> None:
    listener = document["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    python = manager["http_filters"][-1]["typed_config"]
    python["dynamic_module_config"] = {"module": {"local": {"filename": "/nowhere"}}}


def test_envoys_own_log_is_json_by_line(tmp_path: Path) -> None:
    said = json.loads(refusal(tmp_path, forget_the_module).splitlines()[0])
    assert (said["level"], said["logger"]) == ("critical", "envoy.main")


def test_print_front_config_prints_it_and_wants_no_models() -> None:
    command = ("-m", "gateway.cli", "serve")
    flags = ("--front", "envoy", "--http-port", "18000", "--print-front-config")
    done = subprocess.run([sys.executable, *command, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (listener,) = json.loads(done.stdout)["static_resources"]["listeners"]
    assert listener["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 18000}
    assert "request_headers_timeout" in done.stdout


def test_a_folder_whose_socket_would_have_too_long_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="shorten TMPDIR"):
        launch.command(SETTINGS, tmp_path / ("a" * 120), BARE)


def test_the_problem_is_named_where_envoy_is_not_installed() -> None:
    code = (
        "import sys; sys.modules['pyvoy'] = None\n"
        "from gateway.front.envoy import launch; print(launch.problem())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install pyvoy" in done.stdout, done.stderr


def test_importing_the_front_does_not_import_pyvoy() -> None:
    code = (
        "import sys, gateway.front.envoy.application, gateway.front.envoy.launch\n"
        "print([name for name in ('pyvoy', 'envoy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
