"""Lines of native libraries on standard error, with ``--log-format json``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from modelport.gateway.telemetry.native_lines import MOST_BYTES, records
from tests.commands import modelport

#: The first argument is who reads native lines: "program", or the known-bad variant.
_PROGRAM = """
import ctypes, faulthandler, os, subprocess, sys, warnings
from modelport.gateway.settings import LogFormat
from modelport.gateway.telemetry import logs, native_lines
import structlog
if sys.argv[1] == "thread":  # what a reader within the process would do
    import threading
    def divert():
        kept = os.dup(2)
        read, write = os.pipe()
        os.dup2(write, 2)
        def copy():
            for line in os.fdopen(read, "rb"):
                for each in native_lines.records(line.rstrip()):
                    os.write(kept, each)
        threading.Thread(target=copy, daemon=True).start()
        return os.fdopen(kept, "w", 1)
    native_lines.divert = divert
with logs.gateway_log(LogFormat.JSON, 0):
    structlog.get_logger("modelport.test").info("own")
    warnings.warn("of Python")
    os.write(2, b"\\x1b[1;31m2026-01-01 00:00:00.1 [E:onnxruntime:, a.cc:1 Run] failed\\x1b[m\\n")
    os.write(2, b"W0000 00:00:1.1 1 cpu.cc:1] absl\\nnot utf-8: \\xff\\n\\n")
    subprocess.run([sys.executable, "-S", "-c", "import os; os.write(2, b'of a child')"])
    os.write(2, b'\\n{"event": "of a worker"}\\n')
    if sys.argv[2] == "crash":
        faulthandler.enable()
        ctypes.string_at(0)
    os.write(2, b"no end")
print("after", file=sys.stderr)
"""


def lines(divert: str, end: str) -> list[str]:
    """The lines on standard error of a process that ends in this way."""
    command = [sys.executable, "-c", _PROGRAM, divert, end]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    assert (done.returncode < 0) == (end == "crash"), done.stderr
    return done.stderr.splitlines()


def is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("end", ["crash", "return"])
def test_every_line_on_standard_error_is_an_object_whoever_writes_it(end: str) -> None:
    found = lines("program", end)
    if end == "return":
        assert found.pop() == "after"
    assert all(map(is_object, found)), found
    rows = {row["event"]: row for row in map(json.loads, found)}
    assert rows["2026-01-01 00:00:00.1 [E:onnxruntime:, a.cc:1 Run] failed"]["level"] == "error"
    assert rows["W0000 00:00:1.1 1 cpu.cc:1] absl"]["level"] == "warning"
    assert {"own", "not utf-8: \ufffd", "of a child", "of a worker"} <= set(rows)
    assert any("UserWarning: of Python" in event for event in rows)
    if end == "crash":
        assert "Fatal Python error: Segmentation fault" in rows
    else:
        assert "no end" in rows


def test_the_check_finds_that_a_thread_would_lose_the_last_line_of_a_crash() -> None:
    assert not any("Fatal Python error" in line for line in lines("thread", "crash"))


def test_a_line_of_any_length_and_content_becomes_objects() -> None:
    for line in (b"{", b"{}}", b"[1]", b"1", b"{" * 100_000 + b"}", b"\xff\x00\x1b]0;x\x07"):
        found = list(records(line))
        assert all(is_object(each.decode()) and each.endswith(b"\n") for each in found)
    assert len(list(records(b"x" * (2 * MOST_BYTES + 1)))) == 3
    whole = json.dumps({"event": "x" * 3 * MOST_BYTES}).encode()
    assert list(records(whole)) == [whole + b"\n"]


@pytest.mark.parametrize(
    "arguments",
    ["--http-port x", "--nope", "--tls-key", "/nowhere", "--name x"],
)
def test_errors_of_the_command_are_objects_too(arguments: str) -> None:
    done = modelport("serve", "--log-format", "json", *arguments.split())
    assert done.returncode == 2
    assert json.loads(done.stderr)["event"].startswith("modelport: error: ")
    assert done.stderr.count("\n") == 1
