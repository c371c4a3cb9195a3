"""Python runs this at start where the folder is on ``PYTHONPATH``: it adds the ledger backend."""

from modelport.gateway.backend_registry import BACKENDS, BackendDescriptor

BACKENDS.builtin["ledger"] = BackendDescriptor("ledger", "tests.faults.ledger", "Ledger")
