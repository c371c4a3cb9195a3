"""JSON objects of what native libraries write to standard error, for ``--log-format json``.

    python -I -S native_lines.py

The program copies its standard input to its standard output line by line. It is a process of its
own, so that the last line of a gateway that crashes comes out, too. It imports only what starts
fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TextIO

#: A longer line is divided; what has no end yet is taken for a line.
MOST_BYTES, MOST_WITHOUT_END = 16 * 1024, 1024 * 1024
#: Time for the program to write what is left, when the gateway ends.
END_SECONDS = 1.0
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
#: The level in the prefixes of ONNX Runtime, TensorFlow, PyTorch and absl (gRPC, LiteRT).
_LEVEL = re.compile(r".{0,64}?(?:\[|^|: )([VIWEF])(?::onnxruntime|\d{4} | tensorflow/)")
_LEVELS = {"V": "debug", "I": "info", "E": "error", "F": "critical"}

_program: subprocess.Popen[bytes] | None = None
_kept: TextIO | None = None


def divert() -> TextIO | None:
    """Send descriptor 2 through the program; return standard error as it was, for own records.

    Processes that this one starts inherit the diversion. None: no process can be started, and
    native lines stay as they are.
    """
    global _program, _kept
    sys.stderr.flush()
    kept = os.fdopen(os.dup(2), "w", 1, "utf-8", "backslashreplace")
    read, write = os.pipe()
    try:
        # Its own session: a terminal's Ctrl-C is for the gateway, which may have more to say.
        _program = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=read,
            stdout=kept.fileno(),
            stderr=kept.fileno(),
            start_new_session=True,
        )
    except OSError:
        kept.close()
        return None
    else:
        os.dup2(write, 2)
        _kept = kept
        return kept
    finally:
        os.close(read)
        os.close(write)


def end() -> None:
    """Undo ``divert``, if it was called, and wait until everything has been written."""
    global _program, _kept
    with contextlib.suppress(OSError):  # the reader has gone
        sys.stderr.flush()
    if _program is None or _kept is None:
        return
    os.dup2(_kept.fileno(), 2)
    # Longer only if a process that this one has left behind has the pipe open.
    with contextlib.suppress(subprocess.TimeoutExpired):
        _program.wait(END_SECONDS)
    _program = _kept = None


def records(line: bytes) -> Iterator[bytes]:
    """``line`` as JSON objects with lines' ends; a line that is one stays as it is."""
    if line.startswith(b"{") and line.endswith(b"}"):
        try:
            json.loads(line)
            yield line + b"\n"
            return
        except (ValueError, RecursionError):
            pass
    for start in range(0, len(line), MOST_BYTES):
        text = _CONTROL.sub("", line[start : start + MOST_BYTES].decode("utf-8", "replace"))
        found = _LEVEL.match(text)
        level = _LEVELS.get(found[1], "warning") if found else "warning"
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        fields = {"timestamp": f"{stamp}.{nanoseconds // 1000:06}Z", "level": level, "event": text}
        yield json.dumps(fields).encode() + b"\n"


def main() -> None:
    """Copy until every process that writes has ended; signals are for those."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    rest = b""
    while content := os.read(0, 65536):
        *lines, rest = (rest + content).split(b"\n")
        if len(rest) > MOST_WITHOUT_END:
            lines.append(rest)
            rest = b""
        _write(lines)
    _write([rest])


def _write(lines: list[bytes]) -> None:
    for line in lines:
        for text in records(line):
            while text:
                text = text[os.write(1, text) :]


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
