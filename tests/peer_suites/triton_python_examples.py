"""The clients of the Python backend's own examples, as ``examples/test.sh`` calls them."""

from __future__ import annotations

from collections.abc import Iterator

from tests.peer_suites.suite import Bench, SuiteOutcome
from tests.peer_suites.triton_python_models import PYTHON_BACKEND, example

_TEST = "L0_backend_python/examples/test.sh"
#: Client, and its model. ``test.sh`` keeps the earlier models, too.
_EXAMPLES = {
    "add_sub/client.py": {"add_sub": "add_sub"},
    "pytorch/client.py": {"pytorch": "pytorch"},
    "bls/sync_client.py": {"bls_sync": "bls/sync"},
    "decoupled/repeat_client.py": {"repeat_int32": "decoupled/repeat"},
    "decoupled/square_client.py": {"square_int32": "decoupled/square"},
    "bls/async_client.py": {"bls_async": "bls/async"},
    "auto_complete/client.py": {
        "nobatch_auto_complete": "auto_complete/nobatch",
        "batch_auto_complete": "auto_complete/batch",
    },
    "bls_decoupled/sync_client.py": {"bls_decoupled_sync": "bls_decoupled/sync"},
    "bls_decoupled/async_client.py": {"bls_decoupled_async": "bls_decoupled/async"},
    "custom_metrics/client.py": {"custom_metrics": "custom_metrics"},
}


def run(bench: Bench) -> Iterator[SuiteOutcome]:
    if not bench.wanted(_TEST):
        return
    root = bench.work / "examples"
    folder = bench.source(PYTHON_BACKEND)
    for client, models in _EXAMPLES.items():
        example(**models)(bench, root)
        with bench.gateway(root):
            file = f"examples/{client}"
            yield bench.script(f"{_TEST}::{client}", file, cwd=folder, says="PASS")
