"""The version policy of a model: which of its versions are served."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class VersionPolicy(NamedTuple):
    """The versions to serve: those of ``specific`` if set, else the newest ``latest``; None:
    all."""

    latest: int | None = 1
    specific: frozenset[int] | None = None

    @classmethod
    def of(cls, policy: Any) -> VersionPolicy:
        """Read a ``ModelVersionPolicy``, or TensorFlow Serving's ``ServableVersionPolicy``."""
        if policy.HasField("specific"):
            return cls(specific=frozenset(policy.specific.versions))
        if policy.HasField("all"):
            return cls(latest=None)
        return cls(latest=max(1, policy.latest.num_versions))

    def chosen(self, available: Iterable[int]) -> list[int]:
        """The served versions among ``available``, newest first."""
        newest_first = sorted(available, reverse=True)
        if self.specific is not None:
            return [version for version in newest_first if version in self.specific]
        return newest_first[: self.latest]
