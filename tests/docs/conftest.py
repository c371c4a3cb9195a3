from __future__ import annotations

from tests.exporters.economy import _economy

__all__ = ["_economy"]
