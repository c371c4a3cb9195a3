"""Which version to load or unload next: a pure function of a snapshot.

Availability-preserving, as TensorFlow Serving's ``availability_preserving_policy.cc``: everything
wanted is loaded before anything unwanted is unloaded. Where the newest version cannot be served the
next older one is wanted in its place, so a bad release never takes a model down.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field

from gateway.repository.config import ModelConfig


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """``specific`` set: those. Else the newest ``latest``; None: all."""

    latest: int | None = 1
    specific: frozenset[int] | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> VersionPolicy:
        policy = config.version_policy
        if policy.HasField("specific"):
            return cls(specific=frozenset(policy.specific.versions))
        if policy.HasField("all"):
            return cls(latest=None)
        return cls(latest=max(1, policy.latest.num_versions))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``available``, ``serving`` and ``failed`` map a version to what identifies its content."""

    policy: VersionPolicy
    available: Mapping[int, Hashable] = field(default_factory=dict)
    serving: Mapping[int, Hashable] = field(default_factory=dict)
    failed: Mapping[int, Hashable] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    version: int


@dataclass(frozen=True, slots=True)
class Unload:
    version: int


def wanted(snapshot: Snapshot) -> Collection[int]:
    """The versions the policy asks for, newest first, passing over those known not to load."""
    newest_first = sorted(snapshot.available, reverse=True)
    if snapshot.policy.specific is not None:
        return [v for v in newest_first if v in snapshot.policy.specific]
    if snapshot.policy.latest is None:
        return newest_first
    usable = [v for v in newest_first if v in snapshot.serving or not _failed(snapshot, v)]
    return usable[: snapshot.policy.latest]


def next_action(snapshot: Snapshot) -> Load | Unload | None:
    """The next step towards what is wanted, or None when nothing is left to do.

    The last version that serves is never taken away: while nothing that is wanted serves, because
    it does not load or because every version has vanished from disk, what is served stays.
    """
    targets = wanted(snapshot)
    for version in targets:
        current = snapshot.serving.get(version) == snapshot.available[version]
        if not (version in snapshot.serving and current) and not _failed(snapshot, version):
            return Load(version)
    if any(version in snapshot.serving for version in targets):
        for version in sorted(snapshot.serving):
            if version not in targets:
                return Unload(version)
    return None


def _failed(snapshot: Snapshot, version: int) -> bool:
    return version in snapshot.failed and snapshot.failed[version] == snapshot.available[version]
