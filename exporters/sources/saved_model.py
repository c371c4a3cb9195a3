"""What a SavedModel must be to be exported: one graph, with one signature to serve, that only
computes (``modelport.gateway.repository.saved_model``)."""

from __future__ import annotations

from pathlib import Path

import modelport.exporters.tensorflow_runtime  # noqa: F401  # before TensorFlow: it keeps it quiet
from modelport.gateway.cli.errors import UsageError
from modelport.gateway.repository import saved_model

SIGNATURE = "serving_default"


def check(folder: Path) -> None:
    """Read the graph in ``folder`` without loading it.

    Raises:
        UsageError: it has no signature ``serving_default``, or no graph or several.
        IntegrityError: it is damaged, or it reaches out of the model.
    """
    graphs = saved_model.read(folder).meta_graphs
    if len(graphs) != 1:
        raise UsageError(
            f"'{folder.name}' holds {len(graphs)} graphs, one is needed; save it again for serving"
        )
    if SIGNATURE not in graphs[0].signature_def:
        there = [name for name in sorted(graphs[0].signature_def) if not name.startswith("__")]
        raise UsageError(
            f"'{folder.name}' has no signature '{SIGNATURE}', only "
            f"{', '.join(there) or 'none at all'}; save it with signatures={{'{SIGNATURE}': ...}}"
        )
    saved_model.check(folder)
