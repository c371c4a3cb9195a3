"""Servers as measured child processes: real ones, with the 4-float model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from modelport.gateway.runtime import child_process
from modelport.gateway.runtime.child_process import ChildProcess
from modelport.loadtests.load.payloads import BadPayload, Payloads
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.serving import tfserving
from modelport.loadtests.serving.answer_check import AnswerCheck
from modelport.loadtests.serving.gateway import MeasuredGateway, newest_version, only_version
from modelport.loadtests.serving.server import (
    AnswersWrongly,
    MeasuredServerLaunch,
    ReadyServer,
    served,
)
from modelport.loadtests.system import process_tree
from modelport.loadtests.system.environments import Missing
from modelport.loadtests.system.processes import ServerFailed
from modelport.loadtests.users.client import Unanswered
from tests.loadtests.contenders import doubled, published


@dataclass(frozen=True)
class StandInProgram:
    """A program in a server's place."""

    code: str

    def launch(self, work: Path) -> MeasuredServerLaunch:
        return MeasuredServerLaunch((sys.executable, "-c", self.code), {}, ready=lambda: False)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadyServer]:
    with served(MeasuredGateway(published()), tmp_path_factory.mktemp("gateway") / "run") as server:
        yield server


def test_the_first_correct_answer_comes_after_ready(gateway: ReadyServer) -> None:
    assert 0.05 < gateway.cold_start_seconds < gateway.first_response(doubled())


def test_every_dialect_of_the_gateway_is_a_target_at_its_port(gateway: ReadyServer) -> None:
    assert set(gateway.targets) == set(LoadTestProtocol)
    ports = {target.address for target in gateway.targets.values()}
    assert len(ports) == 2


@pytest.mark.parametrize("protocol", LoadTestProtocol)
def test_right_and_wrong_answers_are_distinguished_in_every_dialect(
    gateway: ReadyServer, protocol: LoadTestProtocol
) -> None:
    asked = doubled(4)
    assert asked.expected is not None
    wrong = replace(asked, expected=(*asked.expected[:3], {"y": asked.expected[3]["y"] + 0.5}))
    with AnswerCheck(gateway.targets[protocol], wrong) as examination:
        problems = [examination.problem(number) for number in range(4)]
    assert problems == [None, None, None, "output 'y' is off by 0.1 or more"]


def test_an_answer_that_is_an_error_carries_status_and_reason(gateway: ReadyServer) -> None:
    unknown = LoadTestTarget(
        LoadTestProtocol.OIP_HTTP, gateway.http_target.address, "no-such-model"
    )
    with (
        AnswerCheck(unknown, doubled()) as examination,
        pytest.raises(Unanswered, match="HTTP 404"),
    ):
        examination.problem(0)


def test_memory_and_processor_time_are_those_of_the_process(gateway: ReadyServer) -> None:
    assert 20e6 < gateway.memory_bytes() < 1e9
    before = gateway.cpu_seconds()
    assert before > 0.1
    with AnswerCheck(gateway.http_target, doubled()) as examination:
        for number in range(16):
            examination.problem(number)
    assert gateway.cpu_seconds() >= before


def test_a_wrong_answer_fails_at_once_and_is_no_first_response(gateway: ReadyServer) -> None:
    asked = doubled(1)
    wrong = replace(asked, expected=({"y": asked.requests[0]["x"]},))
    within = time.perf_counter() - gateway.started + 600
    with pytest.raises(AnswersWrongly, match=r"request 1 \(x = \[\[.* at \[0, 0\], expected "):
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
        family = list(process_tree.processes(process.pid))
        assert len(family) == 4
        if sys.platform == "linux":
            assert 50e6 < process_tree.memory_bytes(process.pid) < 100e6
        for member in reversed(family):
            member.kill()
    assert process_tree.memory_bytes(process.pid) == 0


def test_a_server_that_ends_at_once_fails_with_what_it_said(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerFailed, match=r"exited with 7 before it was ready\nno luck"),
        served(
            StandInProgram("print('no luck', flush=True); raise SystemExit(7)"), tmp_path / "run"
        ),
    ):
        pass


def test_a_server_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with (
        pytest.raises(ServerFailed, match="not ready after"),
        served(StandInProgram(code), tmp_path / "run", ready_seconds=0.5),
    ):
        pass
    pid = int((tmp_path / "run" / "server.log").read_text())
    assert not psutil.pid_exists(pid)


def test_nothing_of_a_server_is_left_whatever_happens_inside(tmp_path: Path) -> None:
    family: list[psutil.Process] = []

    def interrupted() -> None:
        with served(MeasuredGateway(published()), tmp_path / "run") as server:
            family.extend(process_tree.processes(server.process.pid))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert family
    assert not any(process.is_running() for process in family)


def test_a_killed_measurer_leaves_nothing_of_a_server_that_started_others(tmp_path: Path) -> None:
    """SIGKILL; the server is a launcher, as TorchServe's is, whose own end reaches no child."""
    launcher = "import subprocess; subprocess.Popen(['sleep', '60']).wait()"
    program = f"""
import sys
from pathlib import Path
from typing import Any
from modelport.loadtests.serving.server import MeasuredServerLaunch, served
class Launcher:
    def launch(self, work):
        return MeasuredServerLaunch((sys.executable, "-c", {launcher!r}), {{}}, ready=lambda: True)
with served(Launcher(), Path({str(tmp_path / "run")!r})) as server:
    print(server.process.pid, flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as measurer:
        assert measurer.stdout is not None
        server = psutil.Process(int(measurer.stdout.readline()))
        give_up = time.monotonic() + 30
        while not (children := server.children()):
            assert time.monotonic() < give_up
        measurer.kill()
    assert psutil.wait_procs([server, *children], timeout=30)[1] == []


def test_a_server_stays_on_the_cores_it_is_given(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with served(MeasuredGateway(published()), tmp_path / "run", cores=(core,)) as server:
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


def test_requests_without_right_answers_are_no_examination() -> None:
    made = Payloads(({"x": np.float32([[1]])},), {"x": "FP32"})
    with pytest.raises(BadPayload, match="it has no expected answers"):
        AnswerCheck(LoadTestTarget(LoadTestProtocol.OIP_HTTP, "127.0.0.1:1", "m"), made)


def test_a_signal_amid_a_fork_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python swallows what is raised in a callback of a fork; the child must not outlive it."""
    made: list[int] = []
    popen = subprocess.Popen.__init__

    def forked(self: ChildProcess, *arguments: Any, **options: Any) -> None:
        child_process.interrupt(signal.SIGTERM, None)
        popen(self, *arguments, **options)
        made.append(self.pid)

    monkeypatch.setattr(subprocess.Popen, "__init__", forked)
    with pytest.raises(KeyboardInterrupt):
        ChildProcess([sys.executable, "-c", "import time; time.sleep(60)"])
    assert not psutil.pid_exists(made[0])
    with pytest.raises(KeyboardInterrupt):
        child_process.interrupt(signal.SIGTERM, None)
