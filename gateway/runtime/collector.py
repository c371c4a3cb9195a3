"""The garbage collector, restricted to what requests and models allocate.

A full collection visits every container of the process and holds the interpreter lock meanwhile:
50 ms with the gateway's modules alone, 300 ms with TensorFlow's. A single request with many values
can cause one, and importing causes several. Modules live as long as the process, so that to visit
them is of no use.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Collect nothing within the block, which imports modules, and exempt them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        exempt_modules()
        if was_enabled:
            gc.enable()


def exempt_modules() -> None:
    """Exempt all objects that live now from collections. Call this after imports.

    Call it seldom: objects in reference cycles that are exempt are never freed.
    """
    gc.freeze()
