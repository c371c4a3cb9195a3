"""Logs of a process that runs the programs of several."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import structlog


def forget_logs() -> None:
    """Forget how logs were configured, which loggers keep from first use on."""
    structlog.reset_defaults()
    for name, module in list(sys.modules.items()):
        if name.startswith("modelport."):
            vars(getattr(module, "log", SimpleNamespace())).pop("bind", None)
