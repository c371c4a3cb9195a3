"""The models as dialects see them: of a manager, or only those that a caller may see."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from modelport.gateway.models.model import ServedVersion


class ModelView(Protocol):
    """Methods are those of ``ModelManager``."""

    @property
    def draining(self) -> asyncio.Event: ...

    @property
    def closing(self) -> asyncio.Event: ...

    def get(self, name: str, number: int = 0) -> ServedVersion: ...

    def find(self, name: str, number: int = 0) -> ServedVersion | None: ...

    def names(self) -> list[str]: ...

    def versions(self, name: str) -> list[int]: ...

    def labels(self, name: str) -> Mapping[str, int]: ...

    def version_of(self, name: str, label: str) -> int: ...

    def index(self, ready_only: bool = False) -> list[dict[str, str]]: ...
