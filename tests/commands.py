"""The command ``modelport`` in this process: a process of its own takes a third of a second."""

from __future__ import annotations

import subprocess
from typing import Any

from click.testing import CliRunner, Result

from modelport import cli


def modelport(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command; an exception that it does not handle is the test's."""
    runner = CliRunner(env={"COLUMNS": "160"})
    done = runner.invoke(cli.modelport, arguments, stdin, prog_name="modelport")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def failed(result: Any, code: int) -> str:
    """The one line that ``result`` failed with."""
    status = result.exit_code if isinstance(result, Result) else result.returncode
    assert status == code, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("modelport: error: ")
    assert "Traceback" not in result.stdout + result.stderr
    return str(lines[0])
