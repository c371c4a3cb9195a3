"""An export that a signal ends removes its folder at once, and says so in one line."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import modelport.exporters.formats.onnx as formats_onnx
from modelport.exporters.publishing.file_errors import STAGING_PREFIX

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
