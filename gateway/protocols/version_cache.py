"""Cache of values that a dialect computes once for each loaded model version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from modelport.gateway.models.model import ServedVersion

T = TypeVar("T")


class VersionCache(Generic[T]):
    """Calls ``make`` on the first use of a version, and keeps the value as long as the version."""

    def __init__(self, make: Callable[[ServedVersion], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[ServedVersion, T] = WeakKeyDictionary()

    def __call__(self, served: ServedVersion) -> T:
        made = self._made.get(served)
        if made is None:
            made = self._made[served] = self._make(served)
        return made
