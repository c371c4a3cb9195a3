"""Standard output and error of a worker, as lines of the gateway's log.

A model that prints without end waits for its pipe: a second has ``MAX_LINES`` lines, the others are
counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import Any

import structlog

from modelport.gateway.backends.python_worker.frames import LOG_MARK

log = structlog.get_logger("modelport.python")

#: Lines of one worker that are logged each second, and characters of each.
MAX_LINES, MAX_LINE = 200, 4096
_READ_BYTES = 64 * 1024
#: The pause after a full read.
_PAUSE_SECONDS = 0.02
_MARK = LOG_MARK.encode()
_LEVELS = {"INFO": "info", "WARNING": "warning", "ERROR": "error", "VERBOSE": "debug"}


class WorkerOutput:
    """Reads the pipe ``descriptor``, and closes it at its end. Belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int, instance: str) -> None:
        self._loop, self._descriptor = loop, descriptor
        self._log = log.bind(instance=instance)
        self._rest = b""
        self._second, self._lines, self._dropped = 0.0, 0, 0
        self._pause: asyncio.TimerHandle | None = None
        os.set_blocking(descriptor, False)
        loop.add_reader(descriptor, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) < _READ_BYTES else b""
        for line in lines:
            self._line(line)
        if len(data) == _READ_BYTES:
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._descriptor, self._read)

    def _line(self, line: bytes) -> None:
        now = self._loop.time()
        if now - self._second >= 1.0:
            if self._dropped:
                self._log.warning("lines of a model's output were dropped", lines=self._dropped)
            self._second, self._lines, self._dropped = now, 0, 0
        self._lines += 1
        if self._lines > MAX_LINES:
            self._dropped += 1
        elif line.startswith(_MARK):
            self._record(line[len(_MARK) :])
        elif line:
            self._log.info("model output", line=line[:MAX_LINE].decode(errors="replace"))

    def _record(self, line: bytes) -> None:
        try:
            level, message, file, number = json.loads(line)
            write: Any = getattr(self._log, _LEVELS[level])
            write(str(message)[:MAX_LINE], file=f"{str(file)[:256]}:{int(number)}")
        except (ValueError, LookupError, TypeError, RecursionError):
            self._log.info("model output", line=line[:MAX_LINE].decode(errors="replace"))

    def close(self) -> None:
        """Log what has come, and close the pipe."""
        if self._descriptor < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._loop.remove_reader(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):  # the last words of a process that has ended
            for line in os.read(descriptor, _READ_BYTES).split(b"\n"):
                self._rest += line
                self._line(self._rest)
                self._rest = b""
        os.close(descriptor)
        if self._rest:
            self._line(self._rest)
        if self._dropped:
            self._log.warning("lines of a model's output were dropped", lines=self._dropped)
