"""What makes the start of a process that serves short: ``hasten`` first, ``settle`` in the end."""

from __future__ import annotations

import gc
import importlib
import sys


def hasten() -> None:
    """No garbage is collected until ``settle``, and structlog goes without rich.

    What imports make stays: to look through it again and again takes a tenth of the start. Rich,
    which structlog would import for tracebacks that this gateway prints plain, takes a sixth.
    """
    gc.disable()
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]


def settle() -> None:
    """Garbage is collected again, but for what is there now: no collection has to look at that."""
    gc.freeze()
    gc.enable()
