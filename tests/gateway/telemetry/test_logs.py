"""Logs on standard error."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_LOG = """
import json, logging, sys, structlog
from modelport.gateway.settings import LogFormat
from modelport.gateway.telemetry import configure_logging

writes = []

class Raw:
    def write(self, text):
        writes.append(text)
    def flush(self):
        pass

configure_logging(LogFormat.JSON, 0)
sys.stderr = Raw()
structlog.get_logger("modelport.test").info("a line", number=1)
logging.getLogger("library").warning("another")
print(json.dumps(writes))
"""


def test_each_line_is_one_system_call_with_its_end() -> None:
    """Several processes write to the same pipe, and a system call of theirs is not divided."""
    found = subprocess.run(
        [sys.executable, "-c", _LOG],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    writes = json.loads(found.stdout)
    assert [json.loads(each)["event"] for each in writes] == ["a line", "another"]
    assert all(each.endswith("\n") for each in writes)


_CONSOLE = """
import logging, structlog, sys
from modelport.gateway.settings import LogFormat
from modelport.gateway.telemetry import configure_logging

configure_logging(LogFormat(sys.argv[1]), 0)
evil = "".join(map(chr, (*range(32), 127, 128, 155, 0x202E))) + "\\x1b]0;title\\x07"
structlog.get_logger("modelport.test").info(evil, model=evil, number=1)
logging.getLogger("library").warning(evil)
try:
    raise ValueError(evil)
except ValueError:
    structlog.get_logger("modelport.test").exception("failed")
"""


@pytest.mark.parametrize("log_format", ["default", "ISO8601", "json"])
def test_nothing_in_a_log_controls_a_terminal(log_format: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", _CONSOLE, log_format], capture_output=True, text=True, check=True
    )
    strange = {c for c in found.stderr if not c.isprintable()} - set("\n\t")
    assert not strange
    assert "\\x1b" in found.stderr or "\\u001b" in found.stderr


_LEVELS = """
import logging, structlog
from modelport.gateway.settings import LogFormat
from modelport.gateway.telemetry import configure_logging
from modelport.gateway.telemetry.logs import LOGS

configure_logging(LogFormat.JSON, 0)
for level in ("none", "info", "warning", "error"):
    if level != "none":
        LOGS.update({f"log_{level}": False})
    for name in ("debug", "info", "warning", "error"):
        getattr(structlog.get_logger("modelport.test"), name)(f"{level} {name}")
        getattr(logging.getLogger("library"), name)(f"{level} library {name}")
LOGS.update({"log_verbose_level": 1})
structlog.get_logger("modelport.test").debug("verbose")
"""


def test_a_level_that_is_turned_off_is_written_by_nobody() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _LEVELS], capture_output=True, text=True, check=True
    )
    assert [json.loads(line)["event"] for line in found.stderr.splitlines()] == [
        *("none info", "none warning", "none library warning", "none error", "none library error"),
        *("info warning", "info library warning", "info error", "info library error"),
        *("warning error", "warning library error"),
        "verbose",
    ]
