"""Garbage collections during an export, which visit only what the export has made.

An export collects garbage several times, because a converter's graphs hold copies of the weights in
reference cycles. A collection that visits all objects of torch, transformers and TensorFlow takes
half a second.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_without_libraries() -> Iterator[None]:
    """Exempt all objects that live now from garbage collections, until the block ends."""
    is_exempt = gc.get_freeze_count() > 0  # by somebody else, who wants it to last
    gc.freeze()
    try:
        yield
    finally:
        if not is_exempt:
            gc.unfreeze()
