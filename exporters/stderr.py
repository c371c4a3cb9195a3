"""Standard error below Python, where C++ libraries print what no setting of theirs turns off."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """File descriptor 2 goes nowhere meanwhile, for every thread: keep it short."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
