"""Sides in object storage. Slow: `make gate-real` runs it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from modelport.loadtests.cli import gate as cli
from tests.gateway.repository.storage.moto_server import ENVIRONMENT, Moto
from tests.loadtests.gating.models import published

pytestmark = pytest.mark.skipif(
    "MODELPORT_SLOW_TESTS" not in os.environ, reason="slow: set MODELPORT_SLOW_TESTS=1"
)
SLO = "[duration]\nslice_seconds = 0.4\nwarmup_seconds = 0.1\nslices = 1\n"


@pytest.fixture
def moto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Moto]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    server = Moto(tmp_path / "moto.log")
    model = published(tmp_path / "repository" / "tiny", versions=2)
    server.upload(model, "prod/tiny")
    yield server
    server.close()


def gate(baseline: str, candidate: str, tmp_path: Path) -> tuple[int, str, str]:
    """Exit code, what it said of its questions, and standard error."""
    (tmp_path / "slo.toml").write_text(SLO)
    report = tmp_path / "gate.json"
    told = [baseline, candidate, "--slo", str(tmp_path / "slo.toml"), "--json-report", str(report)]
    found = CliRunner().invoke(cli.gate, [*told, "--max-duration", "30s"])
    details = ""
    if report.exists():
        document = json.loads(report.read_text())
        assert (document["baseline"], document["candidate"]) == (baseline, candidate)
        details = " ".join(one["detail"] for one in document["questions"])
    return found.exit_code, details, found.stderr


def test_a_stored_model_is_its_newest_version_and_does_not_fail_against_the_one_before(
    moto: Moto, tmp_path: Path
) -> None:
    status, details, _ = gate(moto.url("prod/tiny/1"), moto.url("prod/tiny"), tmp_path)
    assert status in (0, 3), details
    assert "files as in the manifest" in details


def test_a_stored_candidate_whose_files_were_changed_fails_unmeasured(
    moto: Moto, tmp_path: Path
) -> None:
    moto.put("prod/tiny/2/model.onnx", b"x")
    status, details, _ = gate(moto.url("prod/tiny/1"), moto.url("prod/tiny/2"), tmp_path)
    assert status == 1
    assert "model.onnx" in details


@pytest.mark.parametrize(
    ("baseline", "said"),
    [("prod/tiny/7", "neither a published version"), ("prod/tiny/2", "not what was published")],
)
def test_a_stored_baseline_that_cannot_be_had_is_a_usage_error(
    baseline: str, said: str, moto: Moto, tmp_path: Path
) -> None:
    moto.put("prod/tiny/2/model.onnx", b"x")
    status, _, told = gate(moto.url(baseline), moto.url("prod/tiny/1"), tmp_path)
    assert (status, told.count("modelport: error:")) == (2, 1)
    assert said in told
    assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in told
