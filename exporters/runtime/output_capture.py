"""Silence the output of converters: warnings, logging, stdout, and what C++ code prints.

All of this belongs to the process. Blocks of several threads that overlap share one silence: if
each put back what it had found, the last one would leave the process silent.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator


class SharedSilence:
    """A silence that begins with the first block and ends with the last one."""

    def __init__(self, begin: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._begin, self._end = begin, contextlib.ExitStack()
        self._lock, self._blocks = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                self._end.enter_context(self._begin())
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._end.close()


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        logging.disable(disabled)


_MUTED, _QUIET = SharedSilence(_muted), SharedSilence(_quiet)


def muted() -> SharedSilence:
    """Discard everything written to file descriptor 2, by any thread; keep the block short."""
    return _MUTED


def quiet() -> SharedSilence:
    """Discard everything that Python code prints, warns or logs."""
    return _QUIET
