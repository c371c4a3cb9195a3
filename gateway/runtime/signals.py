"""Signals that ask a gateway to stop."""

from __future__ import annotations

import signal


def ending() -> list[signal.Signals]:
    """Return SIGTERM, SIGINT, and SIGHUP unless ``nohup`` ignores it."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]
