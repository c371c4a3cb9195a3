"""``modelport doctor``: what it finds, and that nothing broken can take it along."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from modelport.gateway.cli import doctor
from modelport.loadtests.system.environments import ROOT
from modelport.loadtests.system.processes import free_ports
from tests import models
from tests.server import serving


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "modelport", "doctor", *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(done.stdout)}


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_machine_with_onnxruntime_is_well() -> None:
    import onnxruntime

    done = run("--json")
    assert done.returncode == 0, done.stderr
    found = rows(done)
    assert found["onnxruntime"]["state"] == "ok"
    assert found["onnxruntime"]["version"] == onnxruntime.__version__
    assert found["pytorch (torch)"]["state"] == "ok"
    assert {"java", "perf_analyzer"} <= found.keys()
    table = run()
    assert table.returncode == 0
    assert "onnxruntime" in table.stdout


def test_every_extra_in_the_report_is_one_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for extra, distribution in doctor.EXTRAS.items():
        assert any(each.startswith(distribution) for each in extras.get(extra, ())), extra


def test_a_broken_library_costs_its_row_and_the_exit_status(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("import os\nos.abort()\n")
    done = run("--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert rows(done)["onnxruntime"]["state"] == "broken"
    assert rows(done)["pytorch (torch)"]["state"] == "ok"


def test_every_endpoint_of_the_routes_is_asked(tmp_path: Path) -> None:
    (dead,) = free_ports(1)
    file = tmp_path / "modelport.toml"
    models.multiply(tmp_path / "models" / "x2" / "1" / "model.onnx")
    (tmp_path / "models" / "x2" / "config.pbtxt").write_text(models.X2_CONFIG)
    with serving(tmp_path / "models") as upstream:
        file.write_text(
            f'[models.x2]\nbackend = "triton"\n'
            f'endpoints = ["127.0.0.1:{dead}", "{upstream.grpc}"]\n'
        )
        found = rows(run("--json", "--routes", str(file)))
    assert found[f"x2 at {upstream.grpc}"]["detail"] == "versions READY: 1"
    assert found[f"x2 at 127.0.0.1:{dead}"]["state"] == "down"


def test_a_wrong_routes_file_is_one_line(tmp_path: Path) -> None:
    done = run("--routes", str(tmp_path / "none.toml"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


async def test_a_program_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ASK_SECONDS", 0.2)
    status, said = await doctor._ask(str(program(tmp_path / "hang", "sleep 600")))
    assert (status, said) == (-1, "no response within 0.2 s")


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({"providers": ["CPUExecutionProvider"]}, "missing"),
        ({"providers": ["CUDAExecutionProvider"], "CUDAExecutionProvider": False}, "broken"),
        ({"providers": ["CUDAExecutionProvider"], "CUDAExecutionProvider": True}, "ok"),
    ],
)
async def test_cuda_counts_only_where_a_model_ran_on_it(
    said: dict[str, Any], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(*_: str) -> tuple[int, str]:
        return 0, json.dumps({"version": "1", "CPUExecutionProvider": True, **said})

    monkeypatch.setattr(doctor, "_ask", ask)
    assert (await doctor._onnxruntime(gpu=True))[1].state == state


async def test_a_gpu_is_not_tried_where_there_is_none() -> None:
    found = await doctor._onnxruntime(gpu=False)
    assert found[1].detail == "this machine has no NVIDIA GPU device"
