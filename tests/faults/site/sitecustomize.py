"""Python runs this at start where the folder is on ``PYTHONPATH``: it adds the ledger backend.

``MODELPORT_NO_RETRIES`` makes the known-bad gateway that gives a request up at its first failure.
"""

from __future__ import annotations

import os

from gateway import backends
from gateway.upstream import pool

backends.MODULES["ledger"] = "tests.faults.ledger"
if "MODELPORT_NO_RETRIES" in os.environ:
    pool.RESERVED_RETRIES = pool.EARNED_PER_REQUEST = 0.0
