"""Capabilities of the terminal, as its user states them."""

from __future__ import annotations

import os


def is_dumb() -> bool:
    """Whether the terminal obeys no control sequences."""
    return os.environ.get("TERM") in ("dumb", "unknown")


def is_plain() -> bool:
    """Whether text has no colours, as NO_COLOR (no-color.org) or a dumb terminal asks for."""
    return bool(os.environ.get("NO_COLOR")) or is_dumb()
