"""The signals that end a gateway in order."""

from __future__ import annotations

import signal


def ending() -> list[signal.Signals]:
    """SIGTERM, Ctrl-C, and the end of the terminal unless ``nohup`` has it ignored."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]
