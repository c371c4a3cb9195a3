"""Filter for the output of native libraries, to keep their notices out of the log.

TensorFlow and LiteRT write to file descriptor 2 before any setting can stop them. Other lines
written meanwhile must not be lost, so descriptor 2 is redirected through a filter.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

#: absl's lines below the level of errors, and TensorFlow Lite's notices about its delegates.
NOISE = re.compile(
    rb"[IW]\d{4} \d\d:\d\d:|[IW]0000 00:00:|WARNING: All log messages before absl::|"
    rb"INFO: (Created|Initialized) TensorFlow Lite"
)
#: What TensorFlow reads when it is imported. Where it is set already, that stays.
TENSORFLOW_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3"}

_END = b"\0modelport: end of the filter\n"
#: Guards ``_depth`` and the way of descriptor 2, which is the process's.
_lock = threading.RLock()
_depth = 0
_filter: _Filter | None = None


class _Filter:
    """Descriptor 2 goes through a pipe and a thread, line by line, without the noise."""

    def __init__(self) -> None:
        sys.stderr.flush()
        self._kept = os.dup(2)
        self._read, write = os.pipe()
        os.dup2(write, 2)
        os.close(write)
        self._thread = threading.Thread(target=self._copy, name="quiet", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        # Until the end is read, not until the pipe is closed: a child process may hold it open.
        with open(self._read, "rb", buffering=0) as lines:
            rest = b""
            while content := lines.read(65536):
                *whole, rest = (rest + content).split(b"\n")
                for line in whole:
                    if line.endswith(_END[:-1]):
                        os.write(self._kept, line.removesuffix(_END[:-1]))
                        return
                    if not NOISE.match(line):
                        os.write(self._kept, line + b"\n")

    def close(self) -> None:
        sys.stderr.flush()
        os.write(2, _END)
        os.dup2(self._kept, 2)
        self._thread.join()
        os.close(self._kept)


@contextlib.contextmanager
def filtered_stderr() -> Iterator[None]:
    """Filter descriptor 2. Several threads may use it at once, and it may be nested."""
    global _depth, _filter
    with _lock:
        _depth += 1
        if _filter is None:
            _filter = _Filter()
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                _filter, ended = None, _filter
                assert ended is not None
                ended.close()
