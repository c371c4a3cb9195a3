"""The unit, by systemd's own checks and by the gateway that its command line starts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from modelport.loadtests.system.processes import free_ports, wait_ready
from tests import models
from tests.certificates import TestAuthority
from tests.deploy import DEPLOY, thorough, tools
from tests.deploy.booted import START_SECONDS, Booted, booted, interpreter
from tests.deploy.manifests import served_with
from tests.gateway.access.gateway import write_keys

UNIT = DEPLOY / "systemd" / "modelport.service"
ACCESS = UNIT.with_name("access.conf")
TORCHSERVE = UNIT.with_name("torchserve.service")
PROGRAM = "/opt/modelport/bin/modelport"


def service(unit: Path = UNIT) -> dict[str, list[str]]:
    """Its section [Service]; a key may be there more than once."""
    found: dict[str, list[str]] = {}
    section = unit.read_text().split("[Service]")[1].split("[Install]")[0]
    for key, value in re.findall(r"^(\w+)=(.*)$", section, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def environment(unit: Path = UNIT) -> dict[str, str]:
    lines = service(unit)["Environment"]
    pairs = (pair.partition("=") for line in lines for pair in shlex.split(line))
    return {name: value for name, _, value in pairs}


def command(values: dict[str, str]) -> list[str]:
    """The words that systemd makes of it: ``${A}`` is one word, ``$A`` as many as it has."""
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
            [sys.executable, "-m", "modelport", *arguments],
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


def test_the_drop_in_gives_the_gateway_the_credentials_that_it_names() -> None:
    _, *arguments = command(environment() | environment(ACCESS))
    options = served_with(arguments)
    named = {str(options[name]) for name in ("access", "tls_cert", "tls_key")}
    loaded = dict(line.split(":") for line in service(ACCESS)["LoadCredential"])
    # The rules name the keys, in the folder of their own.
    assert named | {"%d/keys.toml"} == {f"%d/{name}" for name in loaded}
    assert set(loaded.values()) == {f"/etc/modelport/{name}" for name in loaded}
    assert (options["http_address"], options["metrics_address"]) == ("0.0.0.0", "127.0.0.1")
    assert not options["insecure"]
    assert str(options["audit_log"]) == "-"


@thorough
def test_systemd_finds_nothing_wrong_with_the_drop_in(tmp_path: Path) -> None:
    program = tmp_path / "modelport"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / UNIT.name).write_text(UNIT.read_text().replace(PROGRAM, str(program)))
    drop_in = tmp_path / f"{UNIT.name}.d" / ACCESS.name
    drop_in.parent.mkdir()
    verify = (tools.systemd_analyze(), "verify", "--man=no", tmp_path / UNIT.name)
    drop_in.write_text(ACCESS.read_text())
    assert tools.said(*verify, env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:"}) == (0, "")
    drop_in.write_text(ACCESS.read_text().replace("LoadCredential", "LoadCredentials"))
    assert "LoadCredentials" in tools.said(*verify, env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:"})[1]


@thorough
@pytest.mark.parametrize(("source", "exposure"), [(UNIT, 15), (TORCHSERVE, 40)])
def test_systemd_finds_nothing_wrong_and_little_exposed(
    source: Path, exposure: int, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / source.name
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={program}", source.read_text(), flags=re.MULTILINE)
    unit.write_text(text)
    assert tools.check(tools.systemd_analyze(), "verify", "--man=no", unit) == ""
    threshold = f"--threshold={exposure}"
    tools.check(tools.systemd_analyze(), "security", "--offline=true", threshold, unit)
    unit.write_text(text.replace("ProtectSystem", "ProtectSistem"))
    assert "ProtectSistem" in tools.said(tools.systemd_analyze(), "verify", "--man=no", unit)[1]


READY = """
import sys, urllib.request as u
try:
    u.urlopen("http://127.0.0.1:8000/v2/health/ready").close()
    print("yes")
except OSError as error:
    print(error)
"""
ASK = """
import json, urllib.request as u
tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
url = "http://127.0.0.1:8000/v2/models/%s/infer"
body = json.dumps({"inputs": [tensor]}).encode()
print(json.load(u.urlopen(url, body))["outputs"][0]["data"])
"""
#: Run in the service's own view of the machine, as its user.
WRITE = """
import os, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
for path in sys.argv[2:]:
    try:
        open(path, "w").close()
        print(path, "written")
    except OSError as error:
        print(path, error.strerror)
"""


def wait_until_ready(system: Booted) -> None:
    give_up = time.monotonic() + START_SECONDS
    while system.python(READY) != "yes":
        assert time.monotonic() < give_up, system.log.read_text()
        time.sleep(0.2)


@thorough
def test_the_unit_serves_under_a_real_systemd_with_no_more_than_it_needs(tmp_path: Path) -> None:
    """Installed as its head says; asked, killed and started again, drained."""
    folder = models.repository(tmp_path / "models")
    models.fake(folder, "slow", "FP32", "4", delay_seconds="3")
    with booted(UNIT, folder, tmp_path) as system:
        wait_until_ready(system)
        assert system.python(ASK % "x2") == "[2.0, 4.0, 6.0, 8.0]"
        pid = system.show("MainPID")
        status = system.status_of(pid)
        uid = status["Uid"].split()[0]
        assert int(uid) >= 61184  # DynamicUser's
        assert {status[f"Cap{kind}"] for kind in ("Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        written = ("/etc/x", "/opt/modelport/x", "/root/x", "/var/lib/modelport/x", "/tmp/x")
        view = ("nsenter", "--target", pid, "--mount", "--root", "--wd=/", interpreter())
        _, said = system.inside(*view, "-c", WRITE, uid, *written)
        told = dict(line.split(" ", 1) for line in said.splitlines())
        assert [told[path] == "written" for path in written] == [False, False, False, True, True], (
            said
        )

        system.inside("kill", "-KILL", pid)
        give_up = time.monotonic() + START_SECONDS
        while system.show("MainPID") in (pid, "0"):
            assert time.monotonic() < give_up, system.log.read_text()
            time.sleep(0.2)
        wait_until_ready(system)
        assert system.show("NRestarts") == "1"
        drained(system)


def drained(system: Booted) -> None:
    """Check that requests in flight are answered when systemd stops the service."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(system.python, ASK % "slow")
        metrics = (
            "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8002/metrics').read())"
        )
        while 'modelport_requests_in_flight{model="slow",version="1"} 1' not in system.python(
            metrics
        ):
            assert not asked.done(), asked.result()
        assert system.inside("systemctl", "stop", "modelport.service")[0] == 0
        assert asked.result() == "[1.0, 2.0, 3.0, 4.0]"
    assert (system.show("ActiveState"), system.show("Result")) == ("inactive", "success")


RULES = """
[keys]
file = "keys.toml"
[[rules]]
principals = ["ci"]
operations = ["infer"]
"""
#: Over TLS, which it does not verify; the key is the argument.
ASK_WITH_KEY = """
import json, ssl, sys, urllib.error, urllib.request as u
tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
body = json.dumps({"inputs": [tensor]}).encode()
headers = {"x-api-key": sys.argv[1]} if sys.argv[1] else {}
request = u.Request("https://127.0.0.1:8000/v2/models/x2/infer", body, headers)
try:
    print(u.urlopen(request, context=ssl._create_unverified_context()).status)
except u.HTTPError as error:
    print(error.code)
except OSError as error:
    print(error)
"""
#: Run in the service's own view of the machine, as the user of the first argument.
READ = """
import os, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
for path in sys.argv[2:]:
    try:
        open(path).close()
        print(path, "read")
    except OSError as error:
        print(path, error.strerror)
"""


@thorough
def test_the_drop_in_serves_tls_to_known_callers_with_files_that_the_service_alone_reads(
    tmp_path: Path,
) -> None:
    settings = tmp_path / "etc"
    keys = write_keys(settings, "ci")
    (settings / "access.toml").write_text(RULES)
    TestAuthority().write(settings, "tls")
    for file in settings.iterdir():
        file.chmod(0o600)
    folder = models.repository(tmp_path / "models")
    with booted(UNIT, folder, tmp_path, ACCESS, settings) as system:
        give_up = time.monotonic() + START_SECONDS
        while system.python(ASK_WITH_KEY, keys["ci"]) != "200":
            assert time.monotonic() < give_up, system.log.read_text()
            time.sleep(0.2)
        assert system.python(ASK_WITH_KEY, keys["wrong"]) == "401"
        assert system.python(ASK_WITH_KEY, "") in ("401", "403")
        pid = system.show("MainPID")
        uid = system.status_of(pid)["Uid"].split()[0]
        view = ("nsenter", "--target", pid, "--mount", "--root", "--wd=/", interpreter())
        for user, reads in ((uid, True), ("61000", False)):
            paths = ("/etc/modelport/tls.key", "/run/credentials/modelport.service/tls.key")
            _, said = system.inside(*view, "-c", READ, user, *paths)
            told = dict(line.split(" ", 1) for line in said.splitlines())
            assert [told[path] == "read" for path in paths] == [False, reads], said
