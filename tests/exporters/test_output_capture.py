"""Silences that overlap in several threads end with the last one."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from modelport.exporters.runtime.output_capture import muted, quiet
from tests.polling import WAIT_SECONDS


def _overlapping(silence: Callable[[], Any]) -> None:
    """Two blocks of two threads; the one that began first ends first."""
    first_began, second_began, first_ended = (threading.Event() for _ in range(3))

    def first() -> None:
        with silence():
            first_began.set()
            assert second_began.wait(WAIT_SECONDS)
        first_ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_began.wait(WAIT_SECONDS)
    with silence():
        second_began.set()
        assert first_ended.wait(WAIT_SECONDS)
        print("never seen")
        os.write(2, b"" if silence is quiet else b"never seen")
    thread.join()


def test_output_is_seen_again_after_silences_of_two_threads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    filters, streams = warnings.filters[:], (sys.stdout, sys.stderr)
    _overlapping(quiet)
    assert (sys.stdout, sys.stderr) == streams
    assert warnings.filters == filters
    assert logging.root.manager.disable == logging.NOTSET
    print("seen")
    assert capsys.readouterr().out == "seen\n"


def test_the_error_output_of_libraries_is_seen_again_after_silences_of_two_threads(
    capfd: pytest.CaptureFixture[str],
) -> None:
    _overlapping(muted)
    os.write(2, b"seen")
    assert capfd.readouterr().err == "seen"
