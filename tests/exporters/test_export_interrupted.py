"""An export that a signal ends removes its folder at once, and says so in one line."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import modelport.exporters.formats.onnx as formats_onnx
from modelport.exporters import api
from modelport.exporters.runtime.file_errors import STAGING_PREFIX
from modelport.exporters.runtime.temporary_folder import temporary_folder
from modelport.gateway.repository.scan import scan
from tests.thorough import thorough

Invoke = Callable[..., Result]
ENDS = {
    signal.SIGTERM: (143, "terminated"),
    signal.SIGHUP: (129, "hung up"),
    signal.SIGINT: (130, "interrupted"),
}


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that reached the test's own handlers."""
    found: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: found.append(number))
        for number in ENDS
        if number != signal.SIGINT
    }
    # It is ignored where the tests run in the background.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDS, ids=lambda number: signal.Signals(number).name)
def test_a_signal_during_an_export_leaves_no_folder(
    invoke: Invoke,
    fraud_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    received: list[int],
    number: signal.Signals,
) -> None:
    staged: list[Path] = []

    def interrupted(source: Any, path: Path, target: Any) -> None:
        path.write_bytes(b"half an artifact")
        staged.append(path)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(formats_onnx, "export", interrupted)
    done = invoke(fraud_checkpoint)
    code, said = ENDS[number]
    assert (done.exit_code, done.stderr) == (code, f"modelport: error: {said}\n")
    assert staged
    assert STAGING_PREFIX in str(staged[0])
    assert not (tmp_path / "repository").exists()
    assert received == []
    os.kill(os.getpid(), signal.SIGTERM)  # the program's own handler is back
    assert received == [signal.SIGTERM]


STUCK = """
import ctypes, sys, time
from pathlib import Path
import click
from modelport.exporters.publishing import publish
from modelport.exporters.runtime import interruption

interruption.GRACE_SECONDS = 0.1

def compiled_code():
    lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    while True:  # the second call waits for the first, whatever signals come
        libc.pthread_mutex_lock(lock)

def callback():
    while True:
        try:
            time.sleep(100)
        except KeyboardInterrupt:
            pass

@click.command(cls=interruption.InterruptibleCommand)
def command():
    with publish.staging(Path("repository")) as staged:
        (staged / "model.onnx").write_bytes(b"half an artifact")
        print("staged", flush=True)
        globals()[sys.argv[1]]()

command([])
"""


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("compiled_code", signal.SIGINT),
        ("callback", signal.SIGTERM),
        *(thorough("compiled_code", number) for number in ENDS if number != signal.SIGINT),
        *(thorough("callback", number) for number in ENDS if number != signal.SIGTERM),
    ],
)
def test_a_command_ends_even_if_its_thread_does_not_hear_the_signal(
    tmp_path: Path, body: str, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, body],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "staged\n"
            assert list(tmp_path.glob(f"repository/{STAGING_PREFIX}*"))
            process.send_signal(number)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()  # else ``with`` would wait for it
    code, word = ENDS[number]
    assert (process.returncode, said) == (code, f"modelport: error: {word}\n")
    assert not (tmp_path / "repository").exists()


def test_a_killed_process_leaves_one_folder_which_the_next_one_removes(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        from modelport.exporters.runtime.temporary_folder import temporary_folder
        with temporary_folder(Path(sys.argv[1])) as folder:
            folder.joinpath("half").write_bytes(b"half an artifact")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    with temporary_folder(tmp_path) as alive:
        for _ in range(2):
            subprocess.run([sys.executable, "-c", textwrap.dedent(code), tmp_path], check=False)
            (killed,) = set(tmp_path.iterdir()) - {alive}
            assert (killed / "half").exists()
    with temporary_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_an_export_that_ends_at_any_moment_leaves_whole_versions_alone(
    fraud_checkpoint: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    words = [sys.executable, "-m", "modelport", "export", fraud_checkpoint, "--model", "fraud"]
    words += ["--format", "torchscript", "--samples", "16", "--repository", repository]

    def ended(delay: float | None, number: signal.Signals = signal.SIGTERM) -> int:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            try:
                process.wait(delay)
            except subprocess.TimeoutExpired:
                process.send_signal(number)
            said = process.communicate()[1]
        assert "Traceback" not in said
        return process.returncode

    begun = time.monotonic()
    assert ended(None) == 0
    whole, rng = time.monotonic() - begun, random.Random(0)
    for _ in range(12):
        number = rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        code = ended(rng.random() * whole, number)
        assert code in (0, -number, 128 + number)
        (model,) = scan([repository]).values()
        for version in model.versions:
            api.verify(model.path / str(version), integrity=True)
        left = list(repository.glob(f"{STAGING_PREFIX}*"))
        assert len(left) <= (code == -signal.SIGKILL)
    assert ended(None) == 0
    assert list(repository.glob(f"{STAGING_PREFIX}*")) == []
