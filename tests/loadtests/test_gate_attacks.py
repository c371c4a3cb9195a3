"""What breaks in the middle of a gate. Slow: `make gate-real` runs it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.repository import manifest
from loadtests.gate import cli
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("repository") / "tiny", versions=2)


def gate(*arguments: object, tmp_path: Path, slo: str = SLO) -> tuple[Result, str]:
    """What it came to, and all that it said of its questions."""
    path, report = tmp_path / "slo.toml", tmp_path / "gate.json"
    path.write_text(slo)
    told = [*map(str, arguments), "--slo", str(path), "--json", str(report)]
    found = CliRunner().invoke(cli.gate, told)
    details = ""
    if report.exists():
        details = " ".join(one["detail"] for one in json.loads(report.read_text())["questions"])
    return found, details


def test_a_baseline_that_dies_in_the_middle_is_inconclusive_and_named(
    model: Path, tmp_path: Path
) -> None:
    with proxies(("--die-after", "900"), (), model=model) as (dying, sound):
        found, details = gate(dying, sound, "--max-duration", "60s", tmp_path=tmp_path)
    assert found.exit_code == 3, found.output
    assert "the baseline" in details


def test_a_candidate_that_dies_in_the_middle_fails(model: Path, tmp_path: Path) -> None:
    with proxies((), ("--die-after", "900"), model=model) as (sound, dying):
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
    assert "no correct answer" in details


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
