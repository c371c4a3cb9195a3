"""The order of runs, and the pausing of other servers meanwhile."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers import bench, models, process_pausing, runtime_limit, tables
from benchmarks.peers.bench import BenchProgress
from benchmarks.peers.results import PeerCase
from benchmarks.peers.servers import ALL
from modelport.loadtests.serving import pytriton

X2, FRAUD, VIT = (models.ALL[name] for name in ("x2", "fraud128", "vit_b16"))
STATE_SECONDS = 60.0


def test_runs_of_the_same_case_stand_next_to_each_other() -> None:
    options = bench.parse(["--models", "x2"])
    plan = bench.schedule(X2, ["mlserver", "triton", "litserve"], options)
    assert plan[:3] == [(PeerCase("json", 1), name) for name in ("mlserver", "triton", "litserve")]
    assert (PeerCase("grpc", 1), "litserve") not in plan
    assert plan[-1] == (PeerCase("perf_analyzer", 16), "triton")


def test_a_slow_model_is_asked_in_the_first_protocol_that_a_server_knows() -> None:
    options = bench.parse([])
    assert bench.cases(VIT, ALL["triton"], options) == [PeerCase("grpc", 16)]
    assert bench.cases(VIT, ALL["ray"], options) == [PeerCase("binary", 16)]


def test_batching_is_measured_where_a_model_computes() -> None:
    options = bench.parse([])
    for name in tables.BATCHING:
        assert bench.cases(X2, ALL[name], options) == []
        assert bench.cases(FRAUD, ALL[name], options) == [
            PeerCase("json", 16),
            PeerCase("grpc", 16),
        ]


def test_a_batch_gathers_while_another_of_the_preferred_size_runs() -> None:
    for model in models.ALL.values():
        if model.baseline == runtime_limit.NAME:
            assert model.preferred_batch_size in model.batch_sizes
            assert 2 * model.preferred_batch_size <= max(model.in_flight)


def test_the_whole_run_stays_below_25_minutes() -> None:
    assert bench.estimate(bench.parse([])) < 25 * 60


def test_fewer_seconds_are_fewer_answers_but_never_fewer_than_are_in_flight() -> None:
    assert VIT.answers is not None
    assert VIT.timed(None, 2 * VIT.seconds).answers == 2 * VIT.answers
    assert VIT.timed(1, 1).answers == max(VIT.in_flight)


def test_progress_is_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    progress = BenchProgress(125, out)
    progress.say("one")
    progress.trouble("two")
    assert out.getvalue() == "[0:00 of about 2:05] one\ntwo\n"


def test_triton_serves_the_same_files_and_changes_none(tmp_path: Path) -> None:
    version = tmp_path / "repository" / "x2" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(b"model")
    config = version.parent / "config.pbtxt"
    config.write_text('name: "x2"\nplatform: "onnxruntime_onnx"\nmax_batch_size: 8\n')
    before = config.read_text()
    work = tmp_path / "work"
    home = pytriton.onnx_models(tmp_path / "repository", ["x2"], work) / "x2"
    assert (
        home / "config.pbtxt"
    ).read_text() == 'name: "x2"\nmax_batch_size: 8\nbackend: "python"\n'
    assert (home / "1" / "model.onnx").samefile(version / "model.onnx")
    assert (home / "1" / "model.py").is_file()
    assert config.read_text() == before


@pytest.fixture
def parent_and_child() -> Iterator[tuple[subprocess.Popen[str], int]]:
    code = (
        "import subprocess; child = subprocess.Popen(['sleep', '60'], start_new_session=True);"
        "print(child.pid, flush=True); child.wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process, child
    process_pausing.send(process_pausing.family(process.pid), signal.SIGKILL)
    process.stdout.close()
    process.wait()


def wait_for_state(numbers: list[int], stopped: bool) -> None:
    give_up = time.monotonic() + STATE_SECONDS
    while time.monotonic() < give_up:
        stats = [Path(f"/proc/{number}/stat").read_text() for number in numbers]
        states = [stat.rpartition(")")[2].split()[0] for stat in stats]
        if all((state == "T") == stopped for state in states):
            return
    raise AssertionError(f"states {states}")


def test_all_processes_of_a_server_stop_and_go_on(
    parent_and_child: tuple[subprocess.Popen[str], int],
) -> None:
    process, child = parent_and_child
    process_pausing.pause(process.pid)
    wait_for_state([process.pid, child], stopped=True)
    process_pausing.resume(process.pid)
    wait_for_state([process.pid, child], stopped=False)


def test_a_process_that_took_over_a_number_is_left_alone(
    parent_and_child: tuple[subprocess.Popen[str], int],
) -> None:
    process, child = parent_and_child
    earlier = [
        dataclasses.replace(one, began=one.began - 1) for one in process_pausing.family(process.pid)
    ]
    assert {one.number for one in earlier} == {process.pid, child}
    process_pausing.send(earlier, signal.SIGKILL)
    assert process.poll() is None
    os.kill(child, 0)
