"""Failures in the middle of a gate. Slow: `make gate-real` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner, Result

from modelport.gateway.repository import manifest
from modelport.loadtests.cli import gate as cli
from modelport.loadtests.serving.gateway import MODELPORT
from modelport.loadtests.system.environments import ROOT
from tests.full_disk import full_disk
from tests.loadtests.gating.models import published
from tests.loadtests.gating.real import proxies

pytestmark = pytest.mark.skipif(
    "MODELPORT_SLOW_TESTS" not in os.environ, reason="slow: set MODELPORT_SLOW_TESTS=1"
)
SLO = """
[duration]
slice_seconds = 0.5
warmup_seconds = 0.1
slices = 1
ready_seconds = 15.0
"""
#: Locust is still at it when its target dies.
LONG_ROUNDS = SLO.replace("slice_seconds = 0.5", "slice_seconds = 8.0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("repository") / "tiny", versions=2)


def limited(file_bytes: int, model: Path, tmp_path: Path, *arguments: object) -> tuple[int, str]:
    """A gate that may write no file larger: exit code, and what it said."""
    (tmp_path / "slo.toml").write_text(LONG_ROUNDS)
    found = subprocess.run(
        [
            *(*MODELPORT, "gate", str(model / "1"), str(model / "2")),
            *("--slo", str(tmp_path / "slo.toml"), "--max-duration", "30s"),
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        **full_disk(file_bytes),
    )
    return found.returncode, " ".join(found.stdout.split()) + found.stderr


def gate(*arguments: object, tmp_path: Path, slo: str = SLO) -> tuple[Result, str]:
    """Run a gate; return its decision, and its questions' texts."""
    path, report = tmp_path / "slo.toml", tmp_path / "gate.json"
    path.write_text(slo)
    told = [*map(str, arguments), "--slo", str(path), "--json-report", str(report)]
    found = CliRunner().invoke(cli.gate, told)
    details = ""
    if report.exists():
        details = " ".join(one["detail"] for one in json.loads(report.read_text())["questions"])
    return found, details


def test_a_baseline_that_dies_in_the_middle_is_inconclusive_and_named(
    model: Path, tmp_path: Path
) -> None:
    with proxies(("--die-after", "600"), (), model=model) as (dying, sound):
        found, details = gate(dying, sound, "--max-duration", "60s", tmp_path=tmp_path)
    assert found.exit_code == 3, found.output
    assert "the baseline" in details


def test_a_candidate_that_dies_in_the_middle_fails(model: Path, tmp_path: Path) -> None:
    with proxies((), ("--die-after", "200"), model=model) as (sound, dying):
        found, _ = gate(sound, dying, "--max-duration", "60s", tmp_path=tmp_path)
    assert found.exit_code == 1, found.output


def test_a_candidate_that_never_becomes_ready_fails(model: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(model, tmp_path / "repository" / "tiny"))
    artifact = broken / "2" / "model.onnx"
    artifact.write_bytes(artifact.read_bytes()[:-20])
    certificate = json.loads((broken / "2" / "certificate.json").read_text())
    digest = {"sha256": manifest.sha256_of(artifact)}
    certificate["artifact"]["files"] = {artifact.name: digest}
    (broken / "2" / "certificate.json").write_text(json.dumps(certificate))
    manifest.write(broken / "2")
    found, details = gate(model / "1", broken / "2", tmp_path=tmp_path)
    assert found.exit_code == 1, found.output
    assert "the candidate does not start" in details


def test_another_model_answers_wrongly_and_fails(model: Path, tmp_path: Path) -> None:
    other = published(tmp_path / "repository" / "tiny", factor=2.1)
    found, details = gate(model / "1", other, "--max-duration", "40s", tmp_path=tmp_path)
    assert found.exit_code == 1, found.output
    assert "512 of 512 answers are not as the baseline's" in details
    assert "does not start" not in details


@pytest.mark.parametrize("protocol", ["oip-http", "oip-grpc"])
def test_identical_versions_do_not_fail_in_any_protocol(
    protocol: str, model: Path, tmp_path: Path
) -> None:
    found, _ = gate(
        model / "1",
        model / "2",
        *("--protocol", protocol, "--max-duration", "40s"),
        tmp_path=tmp_path,
    )
    assert found.exit_code in (0, 3), found.output


def test_a_disk_that_is_full_before_the_first_round_blames_neither_candidate(
    model: Path, tmp_path: Path
) -> None:
    status, said = limited(4096, model, tmp_path)
    assert status == 3, said
    assert "this machine cannot continue" in said


def test_a_disk_that_fills_up_during_a_round_blames_neither_candidate(
    model: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few.npz"  # requests that fit, so that some hundred samples do not
    np.savez(few, x=np.ones((16, 4), np.float32))
    status, said = limited(8192, model, tmp_path, "--data", few)
    assert status == 3, said
    assert "the samples cannot be written" in said


def test_a_baseline_that_contradicts_itself_is_inconclusive(model: Path, tmp_path: Path) -> None:
    with proxies(("--wrong", "0.02"), (), model=model) as (erring, sound):
        found, details = gate(erring, sound, "--max-duration", "60s", tmp_path=tmp_path)
    assert found.exit_code == 3, found.output
    assert "the baseline changed its answers" in details


@pytest.mark.parametrize(("which", "status"), [("baseline", 3), ("candidate", 1)])
def test_a_server_that_is_killed_in_the_middle_of_a_round_is_named(
    which: str, status: int, model: Path, tmp_path: Path
) -> None:
    with killed_in_the_first_round(which):
        found, details = gate(
            model / "1", model / "2", "--max-duration", "60s", tmp_path=tmp_path, slo=LONG_ROUNDS
        )
    assert found.exit_code == status, found.output
    assert f"the {which} exited under load, with status -9" in details


def test_two_gates_at_once_do_not_meet(model: Path, tmp_path: Path) -> None:
    (tmp_path / "slo.toml").write_text(SLO)
    command = [*MODELPORT, "gate", str(model / "1"), str(model / "2"), "--max-duration", "20s"]
    gates = [
        subprocess.Popen(
            [*command, "--slo", str(tmp_path / "slo.toml")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for _ in range(2)
    ]
    told = [gate.communicate(timeout=120)[0] for gate in gates]
    assert [gate.returncode in (0, 3) for gate in gates] == [True, True], told


@contextlib.contextmanager
def killed_in_the_first_round(which: str) -> Iterator[None]:
    """``kill -9`` for that side's server, as soon as Locust runs."""
    over = threading.Event()
    killed: list[psutil.Process] = []

    def watch() -> None:
        while not killed and not over.wait(0.05):
            lines: dict[psutil.Process, str] = {}
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    lines[child] = " ".join(child.cmdline())
            if any("locustfile" in line for line in lines.values()):
                for child, line in lines.items():
                    if " serve " in line and f"-{which}/repository" in line:
                        child.kill()
                        killed.append(child)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert killed
