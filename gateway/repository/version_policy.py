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

    @property
    def follows_newest(self) -> bool:
        """Whether a version is chosen because it is one of the newest."""
        return self.specific is None and self.latest is not None

    def preferring(
        self, available: Iterable[int], before: int, version: int, other: int, named: Iterable[int]
    ) -> VersionPolicy:
        """A policy that serves ``version`` in place of ``other``, and what has names of its own.

        Args:
            before: the default version so far; if it is ``version``, nothing loses its place.
            named: the versions with a label.
        """
        chosen = set(self.chosen(available))
        kept = set(chosen)
        if before != version:
            kept.discard(other)
            if self.follows_newest:
                kept = {each for each in kept if each < version}
        kept |= {version, *named}
        return self if kept == chosen else VersionPolicy(specific=frozenset(kept))
