"""A full disk for a child process, simulated by a limit on the size of its files."""

from __future__ import annotations

import os
import resource
from typing import Any

#: Files that others write in the child, which the limit would cut short: bytecode and coverage.
_NEVER = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")


def full_disk(file_bytes: int) -> dict[str, Any]:
    """Arguments of ``subprocess.run`` for a child whose files end at this size."""
    kept = {name: value for name, value in os.environ.items() if name not in _NEVER}
    return {
        "env": {**kept, "PYTHONDONTWRITEBYTECODE": "1"},
        "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes)),
    }
