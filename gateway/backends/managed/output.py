"""The output of a managed server, passed on to the gateway's log within limits."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from typing import Any

#: The rest of a longer line is dropped.
MAX_LINE_BYTES = 2000
#: Lines of one server passed on per second; the rest are counted.
LINES_PER_SECOND = 200
#: Lines kept to explain why a server did not start, and the length of that reason.
KEPT_LINES, MAX_REASON = 50, 300

_CHUNK_BYTES = 64 * 1024
#: Terminal colours and other control sequences.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PATH = re.compile(r"(?<![\w:/])(?:/[^\s/:'\",;()\[\]]+){2,}/?")
_TROUBLE = re.compile(r"error|exception|fail|fatal|cannot|unable|not found|no such|invalid", re.I)
#: The prefix of lines of log4j, glog and Triton: time, level, thread.
_HEAD = re.compile(
    r"^(?:\d{4}-\d\d-\d\d[T ][\d:,.]++\S*+\s++\[\w++\s*+\]\s++\S++\s++\S++\s++-\s++"
    r"|[EWIF]\d{4} [\d:.]++ ++\d++ [^\]]++\] "
    r"|\d{4}-\d\d-\d\d [\d:.]++: [EWIF] [^\]]++\] )"
)


class ServerOutput:
    """Reads a server's output; ``log`` is bound to the server, the model and the version."""

    def __init__(self, title: str, log: Any) -> None:
        self._title, self._log = title, log
        self._kept: deque[str] = deque(maxlen=KEPT_LINES)
        self._second, self._lines, self._left_out = 0.0, 0, 0

    @property
    def last(self) -> str:
        return self._kept[-1] if self._kept else ""

    def reason(self) -> str:
        """The last line that reports a problem, or else the last line, without paths; may be ''."""
        lines = [line.strip() for line in self._kept if line.strip()]
        line = next((line for line in reversed(lines) if _TROUBLE.search(line)), lines[-1:])
        text = line if isinstance(line, str) else "".join(line)
        return _PATH.sub("...", _HEAD.sub("", text))[:MAX_REASON]

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read ``stream`` to its end."""
        begun, skipping = b"", False
        while chunk := await stream.read(_CHUNK_BYTES):
            *lines, begun = (begun + chunk).split(b"\n")
            for line in lines:
                if not skipping:
                    self._take(line)
                skipping = False
            if len(begun) > MAX_LINE_BYTES:
                if not skipping:
                    self._take(begun)
                begun, skipping = b"", True
        if begun and not skipping:
            self._take(begun)
        self._log_dropped()

    def _take(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode("utf-8", "replace")
        if len(line) > MAX_LINE_BYTES:
            text += "..."
        text = _CONTROL.sub("", text).rstrip()
        if not text:
            return
        self._kept.append(text)
        now = time.monotonic()
        if now - self._second >= 1.0:
            self._log_dropped()
            self._second, self._lines = now, 0
        self._lines += 1
        if self._lines > LINES_PER_SECOND:
            self._left_out += 1
        else:
            self._log.info(f"{self._title}: {text}")

    def _log_dropped(self) -> None:
        if self._left_out:
            self._log.warning("output lines of a managed server were dropped", lines=self._left_out)
            self._left_out = 0
