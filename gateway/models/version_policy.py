"""Which version to load or unload next: a pure function of a snapshot.

The two ways are TensorFlow Serving's. Availability-preserving (``availability_preserving_policy``):
everything wanted is loaded before anything unwanted is unloaded. Resource-preserving
(``resource_preserving_policy``): what has to go is gone before anything is loaded, so that two
versions never need room at once, at the price of a gap.

Unlike there, a bad release never takes a model down: where the newest version cannot be served the
next older one is wanted in its place, and what was unloaded to make room comes back.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from modelport.gateway.repository.config import ModelConfig


class VersionPolicy(NamedTuple):
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


class VersionSnapshot(NamedTuple):
    """``available``, ``serving`` and ``failed`` map a version to what identifies its content.

    ``displaced`` are the versions that were unloaded to make room for others.
    """

    policy: VersionPolicy
    available: Mapping[int, Hashable] = MappingProxyType({})
    serving: Mapping[int, Hashable] = MappingProxyType({})
    failed: Mapping[int, Hashable] = MappingProxyType({})
    resource_preserving: bool = False
    displaced: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class LoadVersion:
    version: int


@dataclass(frozen=True, slots=True)
class UnloadVersion:
    version: int


def wanted(snapshot: VersionSnapshot) -> Collection[int]:
    """The versions the policy asks for, newest first, passing over those known not to load."""
    newest_first = sorted(snapshot.available, reverse=True)
    if snapshot.policy.specific is not None:
        return [v for v in newest_first if v in snapshot.policy.specific]
    if snapshot.policy.latest is None:
        return newest_first
    usable = [v for v in newest_first if v in snapshot.serving or not _failed(snapshot, v)]
    return usable[: snapshot.policy.latest]


def next_action(snapshot: VersionSnapshot) -> LoadVersion | UnloadVersion | None:
    """The next step towards what is wanted, or None when nothing is left to do.

    The last version that serves is never taken away, but to make room for one that may well load:
    while nothing that is wanted serves, because it does not load or because every version has
    vanished from disk, what is served stays. If nothing serves any more, what was displaced is
    loaded again, whether it is wanted or not.
    """
    targets, serving = wanted(snapshot), snapshot.serving
    missing = [v for v in targets if not _current(snapshot, v) and not _failed(snapshot, v)]
    unwanted = sorted(v for v in serving if v not in targets)
    if missing:
        version = missing[0]
        if snapshot.resource_preserving and (unwanted or version in serving):
            return UnloadVersion(unwanted[0] if unwanted else version)
        return LoadVersion(version)
    if unwanted and any(version in serving for version in targets):
        return UnloadVersion(unwanted[0])
    if not serving:
        for version in sorted(snapshot.displaced, reverse=True):
            if version in snapshot.available and not _failed(snapshot, version):
                return LoadVersion(version)
    return None


def _current(snapshot: VersionSnapshot, version: int) -> bool:
    return version in snapshot.serving and (
        snapshot.serving[version] == snapshot.available[version]
    )


def _failed(snapshot: VersionSnapshot, version: int) -> bool:
    return version in snapshot.failed and snapshot.failed[version] == snapshot.available[version]
