"""Servers as measured child processes: real ones, with the 4-float model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from loadtests import payloads, processes
from loadtests.environments import Missing
from loadtests.payloads import BadPayload, Payloads
from loadtests.processes import ServerFailed
from loadtests.serving import cases, tfserving, tree
from loadtests.serving.ask import Refused, ask
from loadtests.serving.cases import Case, Cases
from loadtests.serving.gateway import Gateway, newest_version, only_version
from loadtests.serving.served import Launch, Served, served
from loadtests.target import Protocol, Target
from tests.loadtests.contenders import doubled, published


@dataclass(frozen=True)
class Command:
    """A program in a server's place."""

    code: str

    def launch(self, work: Path) -> Launch:
        return Launch((sys.executable, "-c", self.code), {}, ready=lambda: False)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(Gateway(published()), tmp_path_factory.mktemp("gateway") / "run") as server:
        yield server


def test_the_first_correct_answer_comes_after_ready(gateway: Served) -> None:
    assert 0.05 < gateway.cold_start_seconds < gateway.first_response(doubled())


def test_every_dialect_of_the_gateway_is_a_target_at_its_port(gateway: Served) -> None:
    assert set(gateway.targets) == set(Protocol)
    ports = {target.address for target in gateway.targets.values()}
    assert len(ports) == 2


def test_the_gateway_is_asked_in_its_http_dialects(gateway: Served) -> None:
    wanted = doubled()
    for protocol in (Protocol.OIP_HTTP, Protocol.TORCHSERVE_HTTP, Protocol.TFSERVING_HTTP):
        for case in wanted.cases:
            assert wanted.wrong(case, ask(gateway.targets[protocol], wanted, case)) is None


def test_a_refusal_carries_status_and_reason(gateway: Served) -> None:
    wanted = doubled()
    unknown = Target(Protocol.OIP_HTTP, gateway.http_target.address, "no-such-model")
    with pytest.raises(Refused, match="HTTP 404"):
        ask(unknown, wanted, wanted.cases[0])


def test_memory_and_processor_time_are_those_of_the_process(gateway: Served) -> None:
    assert 20e6 < gateway.memory_bytes() < 1e9
    before = gateway.cpu_seconds()
    assert before > 0.1
    for case in doubled().cases:
        gateway.answer(doubled(), case)
    assert gateway.cpu_seconds() >= before


def test_an_answer_that_never_is_right_is_no_first_response(gateway: Served) -> None:
    case = doubled().cases[0]
    wrong = Cases((Case(case.inputs, {"y": case.inputs["x"]}),), {"x": "FP32"}, {"y": "FP32"}, 0, 0)
    within = time.perf_counter() - gateway.started + 0.2
    with pytest.raises(ServerFailed, match=r"no correct answer .* off by"):
        gateway.first_response(wrong, within_seconds=within)


def test_children_count_and_memory_that_they_share_counts_once() -> None:
    code = (
        "import os, time\nshared = bytearray(os.urandom(1) * 50_000_000)\n"
        "[os.fork() for _ in range(2)]\nprint('up', flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(4):
            process.stdout.readline()
        family = list(tree.processes(process.pid))
        assert len(family) == 4
        if sys.platform == "linux":
            assert 50e6 < tree.memory_bytes(process.pid) < 100e6
        for member in reversed(family):
            member.kill()
    assert tree.memory_bytes(process.pid) == 0


def test_a_server_that_ends_at_once_fails_with_what_it_said(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerFailed, match=r"ended with 7 before it was ready\nno luck"),
        served(Command("print('no luck', flush=True); raise SystemExit(7)"), tmp_path / "run"),
    ):
        pass


def test_a_server_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with (
        pytest.raises(ServerFailed, match="not ready after"),
        served(Command(code), tmp_path / "run", ready_seconds=0.5),
    ):
        pass
    pid = int((tmp_path / "run" / "server.log").read_text())
    assert not psutil.pid_exists(pid)


def test_nothing_of_a_server_is_left_whatever_happens_inside(tmp_path: Path) -> None:
    family: list[psutil.Process] = []

    def interrupted() -> None:
        with served(Gateway(published()), tmp_path / "run") as server:
            family.extend(tree.processes(server.process.pid))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert family
    assert not any(process.is_running() for process in family)


def test_a_server_stays_on_the_cores_it_is_given(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with served(Gateway(published()), tmp_path / "run", cores=(core,)) as server:
        assert os.sched_getaffinity(server.process.pid) == {core}


def test_only_the_chosen_version_is_served(tmp_path: Path) -> None:
    model = tmp_path / "m"
    for name in ("1", "2", "10", "warmup"):
        (model / name).mkdir(parents=True)
        (model / name / "file").touch()
    (model / "config.pbtxt").touch()
    assert newest_version(model) == "10"
    only_version(model, "2", tmp_path / "out" / "m")
    found = sorted(path.name for path in (tmp_path / "out" / "m").iterdir())
    assert found == ["2", "config.pbtxt", "warmup"]
    with pytest.raises(Missing, match="no version 3"):
        only_version(model, "3", tmp_path / "other" / "m")


def test_what_a_machine_has_not_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Missing, match="install tensorflow-model-server"):
        tfserving.program()


def test_cases_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    made = Cases(
        (
            Case(
                {"x": np.array([[1, -2]]), "n": np.array([[True]])},
                {"y": np.array([[np.nan, 0.1, np.float32(1e-45)]], np.float32)},
            ),
        ),
        {"x": "INT64", "n": "BOOL"},
        {"y": "FP32"},
        1e-6,
        1e-5,
        {"n": ()},
    )
    file = tmp_path / "cases.json"
    cases.write(file, made)
    found = cases.read(file)
    assert (found.atol, found.rtol, found.reshape) == (1e-6, 1e-5, {"n": ()})
    for name, array in made.cases[0].inputs.items():
        assert np.array_equal(found.cases[0].inputs[name], array)
    assert found.cases[0].expected["y"].tobytes() == made.cases[0].expected["y"].tobytes()


@pytest.mark.parametrize("text", ["", "{}", '{"data": [], "validation_data": [], "modelport": {}}'])
def test_a_file_that_holds_no_cases_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(BadPayload, match=r"bad\.json: "):
        cases.read(tmp_path / "bad.json")
    with pytest.raises(BadPayload, match=r"missing\.json: .*No such file"):
        cases.read(tmp_path / "missing.json")


def test_requests_without_answers_are_no_cases(tmp_path: Path) -> None:
    made = Payloads(({"x": np.float32([[1]])},), {"x": "FP32"})
    payloads.write(made, tmp_path / "asked.json")
    with pytest.raises(BadPayload, match="no right answers in it"):
        cases.read(tmp_path / "asked.json")


def test_texts_and_whole_numbers_have_no_tolerance() -> None:
    expected = {"label": np.array([[50_000]]), "text": np.array([[b"yes"]], np.object_)}
    kinds = {"label": "INT64", "text": "BYTES"}
    one = Case({}, expected)
    wanted = Cases((one,), {}, kinds, atol=1e-4, rtol=1e-3)
    assert wanted.wrong(one, expected) is None
    assert "label" in (wanted.wrong(one, {**expected, "label": np.array([[50_001]])}) or "")
    no = np.array([[b"no"]], np.object_)
    assert "text" in (wanted.wrong(one, {**expected, "text": no}) or "")


def test_a_missing_output_a_shape_and_a_value_that_is_not_finite_are_wrong() -> None:
    wanted = doubled(1)
    case = wanted.cases[0]
    right = case.expected["y"]
    assert wanted.wrong(case, {"y": right}) is None
    assert "missing" in (wanted.wrong(case, {}) or "")
    assert "shape" in (wanted.wrong(case, {"y": right[0]}) or "")
    assert wanted.wrong(case, {"y": np.full_like(right, np.nan)}) is not None


def test_a_signal_amid_a_fork_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python swallows what is raised in a callback of a fork; the child must not outlive it."""
    made: list[int] = []

    def forked(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        processes.interrupt(signal.SIGTERM, None)
        child = popen(command)
        made.append(child.pid)
        return child

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", forked)
    with pytest.raises(KeyboardInterrupt):
        processes.start([sys.executable, "-c", "import time; time.sleep(60)"])
    assert not psutil.pid_exists(made[0])
    with pytest.raises(KeyboardInterrupt):
        processes.interrupt(signal.SIGTERM, None)
