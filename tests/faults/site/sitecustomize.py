"""Python runs this at start where the folder is on ``PYTHONPATH``: it adds the ledger backend."""

from __future__ import annotations

from gateway import backends

backends.MODULES["ledger"] = "tests.faults.ledger"
