"""Common code of the programs behind slow ``make`` verbs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from modelport.loadtests.system import environments


def run(main: Callable[[], int]) -> NoReturn:
    """Exit with ``main``'s status; what the machine lacks is one line."""
    # An end by SIGTERM has to pass the finally clauses too: they stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except environments.Missing as error:
        sys.exit(str(error))


def commit() -> str:
    """The commit of the code that runs, and whether it was changed since."""

    def git(*arguments: str) -> str:
        here = Path(__file__).parents[1]
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "gateway", "tests")
    return f"{git('rev-parse', '--short=12', 'HEAD') or 'unknown'}{' (changed)' if changed else ''}"
