"""The next version to load or unload, as a pure function of a snapshot.

The two policies are TensorFlow Serving's. ``availability_preserving_policy`` loads every wanted
version before it unloads an unwanted one. ``resource_preserving_policy`` unloads before it loads,
so that two versions never need memory at once, at the price of a gap.

In contrast to TensorFlow Serving, a bad release never takes a model down: if the newest version
cannot be served, the next older one replaces it, and a version unloaded to make room comes back.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from modelport.gateway.repository.version_policy import VersionPolicy


class VersionHold(NamedTuple):
    """Versions that a rollout keeps served, whatever the policy says; the first ones load first.

    Attributes:
        default: the version for requests without a version; 0: as without a hold.
        kept: the rollout has ended; the versions may be unloaded on request.
    """

    versions: tuple[int, ...] = ()
    default: int = 0
    kept: bool = False


NO_HOLD = VersionHold()


class VersionSnapshot(NamedTuple):
    """The versions of a model; the mappings give an identifier of each version's content.

    ``displaced`` versions were unloaded to make room for others, ``held`` ones are in a rollout.
    """

    policy: VersionPolicy
    available: Mapping[int, Hashable] = MappingProxyType({})
    serving: Mapping[int, Hashable] = MappingProxyType({})
    failed: Mapping[int, Hashable] = MappingProxyType({})
    resource_preserving: bool = False
    displaced: Collection[int] = ()
    held: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class LoadVersion:
    """Load this version."""

    version: int


@dataclass(frozen=True, slots=True)
class UnloadVersion:
    """Unload this version."""

    version: int


def wanted(snapshot: VersionSnapshot) -> Collection[int]:
    """The held versions, and those that the policy asks for, without those known to fail."""
    held = [v for v in snapshot.held if v in snapshot.available]
    return [*held, *(v for v in _chosen(snapshot) if v not in held)]


def _chosen(snapshot: VersionSnapshot) -> list[int]:
    """The versions that the policy asks for, newest first, without those known to fail."""
    policy, usable = snapshot.policy, list(snapshot.available)
    if policy.specific is None and policy.latest is not None:
        usable = [v for v in usable if v in snapshot.serving or not _failed(snapshot, v)]
    return policy.chosen(usable)


def next_action(snapshot: VersionSnapshot) -> LoadVersion | UnloadVersion | None:
    """The next action towards the wanted versions, or None when nothing is left to do.

    The last served version is never unloaded, except to make room for one that may load, nor is a
    version in a rollout. So a model whose wanted versions all fail, or whose versions have vanished
    from disk, is still served. If no version is served, displaced ones are loaded again, wanted or
    not.
    """
    targets, serving = wanted(snapshot), snapshot.serving
    missing = [v for v in targets if not _current(snapshot, v) and not _failed(snapshot, v)]
    unwanted = sorted(v for v in serving if v not in targets and v not in snapshot.held)
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
