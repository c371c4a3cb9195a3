"""``increment`` as a model of ``modelport serve FILE``."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from increment import increment

import modelport

Vector = Annotated[np.ndarray[Any, Any], modelport.Array["FP32", 4]]


@modelport.model(name="increment")
def increment_model(x: Vector) -> Vector:
    """Add 1."""
    return increment(x)  # type: ignore[no-any-return]
