"""The garbage collector, restricted to what requests and models allocate.

A full collection visits every container of the process and holds the interpreter lock meanwhile:
50 ms with the gateway's modules alone, 300 ms with TensorFlow's. A single request with many values
can cause one. Modules live as long as the process, so that to visit them is of no use.
"""

from __future__ import annotations

import gc


def exempt_modules() -> None:
    """Exempt all objects that live now from collections. Call this after imports.

    Call it seldom: objects in reference cycles that are exempt are never freed.
    """
    gc.freeze()
