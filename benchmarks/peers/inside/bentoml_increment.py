"""Runs inside the `bentoml` environment: ``increment`` as a service."""

from __future__ import annotations

import bentoml
import numpy as np
from increment import increment


@bentoml.service(workers=1, traffic={"timeout": 300}, logging={"access": {"enabled": False}})
class IncrementService:
    """``increment`` for arrays."""

    @bentoml.api(route="/increment")
    def increment(self, x: np.ndarray) -> np.ndarray:
        """Add 1."""
        return increment(x)
