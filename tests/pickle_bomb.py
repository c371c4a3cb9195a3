"""A pickle that runs code, to show that nothing unpickles it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class PickleBomb:
    """Makes the folder ``marker`` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)
