"""Files that end the process that loads them end the process that tries them alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelport.exporters.formats.registry import FORMATS
from modelport.gateway.backend_registry import find_loader
from modelport.gateway.backends.base import Artifact
from modelport.gateway.errors import (
    IntegrityError,
    Internal,
    ModelportError,
    Unsupported,
)
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.artifact_checks import trial_load
from modelport.gateway.repository.artifact_checks.torch_archive import EXTRA, SIGNATURE
from tests.attacks import hostile_torch
from tests.attacks.trial_functions import (
    computes,
    crashes,
    exits,
    fails,
    hoards,
    killed,
    lacks_room,
    passes,
    refuses,
    waits,
    waits_for_a_server,
)

LOAD = "import sys, torch; f = torch.jit.load(sys.argv[1])\nwhile True: f(torch.ones(4))"


def served(path: Path, native: bool = False) -> None:
    config = configuration.complete(configuration.parse(hostile_torch.TORCHSCRIPT), "m")
    artifact = Artifact("m", 1, path.parent, config, 1, native=native)
    find_loader("pytorch")(artifact).unload()


def _named(function: Any) -> str:
    return f"{function.__module__}:{function.__name__}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    path.write_bytes(b"weights")
    return path


@pytest.mark.parametrize(
    "what",
    [hostile_torch.CRASHES[0], pytest.param(hostile_torch.CRASHES[1], marks=pytest.mark.thorough)],
)
def test_torchscript_that_ends_its_process_is_refused(
    what: str, tmp_path: Path, trials: Path
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(hostile_torch.crashing()[what])
    with pytest.raises(IntegrityError, match=r"signal 11 \(SIGSEGV\)"):
        served(path)
    ended = subprocess.run([sys.executable, "-c", LOAD, path], capture_output=True)
    assert ended.returncode == -signal.SIGSEGV, "the file is a dud: this test could not fail"


@pytest.mark.thorough
def test_torchscript_that_ends_its_process_is_not_proven(tmp_path: Path, trials: Path) -> None:
    path = tmp_path / "model.pt"
    content = hostile_torch.crashing()["nests expressions without end"]
    signature = (
        '{"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}], '
        '"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}]}'
    )
    record = {EXTRA + SIGNATURE: signature.encode()}
    path.write_bytes(hostile_torch.edited(content, record))
    with pytest.raises(IntegrityError, match="signal 11"):
        FORMATS.builtin["torchscript"].open_session(path)


def test_honest_torchscript_is_tried_once_and_loads(tmp_path: Path, trials: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(hostile_torch.scripted("return x + 1"))
    served(path, native=True)
    assert not trials.exists(), "it is not tried where somebody vouches for it"
    served(path)
    (passed,) = trials.iterdir()
    served(path)
    assert list(trials.iterdir()) == [passed]


def test_content_that_passed_is_not_tried_again_until_something_changes(
    file: Path, trials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []
    monkeypatch.setattr(trial_load, "_run", lambda path, request: tried.append(path))
    for _ in range(2):
        trial_load.run(_named(passes), file, threads=1)
    assert len(tried) == 1
    trial_load.run(_named(passes), file, threads=2)
    assert len(tried) == 2
    file.write_bytes(b"other weights")
    trial_load.run(_named(passes), file, threads=2)
    assert len(tried) == 3
    trials.chmod(0o777)
    trial_load.run(_named(passes), file, threads=2)
    assert len(tried) == 4, "anybody could have written that it passed"


def test_verdicts_are_kept_of_the_newest_files(
    file: Path, trials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_load, "_run", lambda path, request: None)
    monkeypatch.setattr(trial_load, "MAX_VERDICTS", 3)
    for number in range(9):
        trial_load.run(_named(passes), file, number=number)
    assert len(list(trials.iterdir())) == 4


@pytest.mark.parametrize(
    ("function", "kind", "reason"),
    [
        (refuses, Unsupported, "is native code"),
        (crashes, IntegrityError, "SIGSEGV"),
        (computes, IntegrityError, "SIGXCPU"),
        (fails, Internal, "unexpected ZeroDivisionError"),
    ],
)
def test_content_that_failed_is_not_tried_again_until_it_changes(
    function: Any,
    kind: type[Exception],
    reason: str,
    file: Path,
    trials: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Path] = []
    run = trial_load._run
    monkeypatch.setattr(trial_load, "_run", lambda *given: (tried.append(given[0]), run(*given)))
    if function is computes:
        monkeypatch.setattr(trial_load, "CPU_SECONDS", 1)
    more = {"of": "native code"} if function is refuses else {}
    errors = set()
    for _ in range(2):
        with pytest.raises(kind, match=reason) as caught:
            trial_load.run(_named(function), file, **more)
        errors.add(str(caught.value))
    assert (len(tried), len(errors)) == (1, 1)
    file.write_bytes(b"other weights")
    monkeypatch.setattr(trial_load, "_run", lambda path, _: tried.append(path))
    trial_load.run(_named(function), file, **more)
    assert len(tried) == 2


@pytest.mark.parametrize("function", [killed, lacks_room, waits_for_a_server])
def test_a_trial_that_failed_for_want_of_something_is_repeated(
    function: Any, file: Path, trials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelportError):
        trial_load.run(_named(function), file)
    tried: list[Path] = []
    monkeypatch.setattr(trial_load, "_run", lambda path, _: tried.append(path))
    trial_load.run(_named(function), file)
    assert tried == [file]


def test_failures_are_kept_of_the_newest_files(
    file: Path, trials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, request: dict[str, Any]) -> None:
        raise Unsupported(str(request["arguments"]["number"]))

    monkeypatch.setattr(trial_load, "_run", refused)
    monkeypatch.setattr(trial_load, "MAX_FAILURES", 3)
    for number in range(9):
        with pytest.raises(Unsupported):
            trial_load.run(_named(passes), file, number=number)
    assert [reason for _, reason in trial_load._failures.values()] == ["6", "7", "8"]


def test_the_reason_names_how_the_process_ended(file: Path, trials: Path) -> None:
    for function, reason in (
        (crashes, "signal 11 (SIGSEGV)"),
        (exits, "status 7"),
        (fails, "unexpected ZeroDivisionError"),
    ):
        with pytest.raises(ModelportError) as caught:
            trial_load.run(_named(function), file)
        assert "'model.pt' does not load" in str(caught.value)
        assert reason in str(caught.value)


def test_time_and_memory_of_a_trial_are_limited(
    file: Path, trials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_load, "CPU_SECONDS", 1)
    with pytest.raises(IntegrityError, match="SIGXCPU"):
        trial_load.run(_named(computes), file)
    monkeypatch.setattr(trial_load, "CPU_SECONDS", 60)
    monkeypatch.setattr(trial_load, "MEMORY_SHARE", (256 << 20) / trial_load._memory_bytes())
    with pytest.raises(ModelportError, match="MemoryError"):
        trial_load.run(_named(hoards), file)


def test_a_trial_ends_with_the_process_that_waits_for_it(file: Path, trials: Path) -> None:
    pipe = file.parent / "pipe"
    os.mkfifo(pipe)
    code = f"import pathlib, sys; from {trial_load.__name__} import run\n"
    code += f"run('{_named(waits)}', pathlib.Path(sys.argv[1]), told=sys.argv[2])"
    parent = subprocess.Popen([sys.executable, "-c", code, file, pipe])
    descriptor = os.pidfd_open(int(pipe.read_text()))
    parent.kill()
    parent.wait()
    ended, _, _ = select.select([descriptor], [], [], 60)
    os.close(descriptor)
    assert ended
