"""The unit, by systemd's own checks and by the gateway that its command line starts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from loadtests.processes import free_ports, wait_ready
from tests import models
from tests.deploy import DEPLOY, thorough, tools

UNIT = DEPLOY / "systemd" / "modelport.service"
PROGRAM = "/opt/modelport/bin/modelport"


def service() -> dict[str, list[str]]:
    """Its section [Service]; a key may be there more than once."""
    found: dict[str, list[str]] = {}
    section = UNIT.read_text().split("[Service]")[1].split("[Install]")[0]
    for key, value in re.findall(r"^(\w+)=(.*)$", section, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def environment() -> dict[str, str]:
    pairs = (pair.partition("=") for line in service()["Environment"] for pair in shlex.split(line))
    return {name: value for name, _, value in pairs}


def command(values: dict[str, str]) -> list[str]:
    """As systemd makes it: ``${A}`` is one word, ``$A`` as many as it has."""
    (line,) = service()["ExecStart"]
    words = []
    for word in shlex.split(line):
        if match := re.fullmatch(r"\$(\w+)", word):
            words += values[match[1]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], word))
    return words


def test_the_command_starts_a_gateway_that_sigterm_ends_in_time(tmp_path: Path) -> None:
    http, grpc, metrics = free_ports(3)
    values = environment() | {
        "MODELPORT_REPOSITORY": str(models.repository(tmp_path / "models")),
        "MODELPORT_ARGUMENTS": f"--http-port {http} --grpc-port {grpc} --metrics-port {metrics}",
    }
    program, *arguments = command(values)
    assert program == PROGRAM
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", *arguments],
            env={**os.environ, **values, "HOME": str(tmp_path)},
            stderr=out,
        )
    try:
        wait_ready(f"http://127.0.0.1:{http}/v2/health/ready", process, log)
        process.terminate()
        assert process.wait(float(service()["TimeoutStopSec"][0])) == 0
    finally:
        process.kill()
        process.wait()


def test_what_is_in_the_environment_file_alone_needs_no_other_command() -> None:
    words = command(environment())
    assert words[1:4] == ["serve", "--model-repository", "/var/lib/modelport/models"]
    timeout = float(words[words.index("--exit-timeout-secs") + 1])
    assert float(service()["TimeoutStopSec"][0]) > timeout


@thorough
def test_systemd_finds_nothing_wrong_and_little_exposed(tmp_path: Path) -> None:
    program = tmp_path / "modelport"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(PROGRAM, str(program)))
    assert tools.check(tools.systemd_analyze(), "verify", "--man=no", unit) == ""
    tools.check(tools.systemd_analyze(), "security", "--offline=true", "--threshold=15", unit)
    unit.write_text(UNIT.read_text().replace("ProtectSystem", "ProtectSistem"))
    assert "ProtectSistem" in tools.said(tools.systemd_analyze(), "verify", "--man=no", unit)[1]
