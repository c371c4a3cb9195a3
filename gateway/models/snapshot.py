"""Snapshot of model state, used to bring a restarted worker up to date.

One worker's ``describe`` makes it, as JSON values; another worker's ``restore`` applies it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from modelport.gateway.errors import AlreadyExists, NotFound
from modelport.gateway.models.model import ModelRecord, VersionSettings
from modelport.gateway.models.reconciler import Reconciler
from modelport.gateway.repository.version_policy import VersionPolicy

#: The settings of each requested model, by name.
Snapshot = Mapping[str, Mapping[str, Any]]


def describe(models: Mapping[str, ModelRecord]) -> dict[str, dict[str, Any]]:
    return {name: _settings(model) for name, model in models.items() if _is_requested(model)}


def _settings(model: ModelRecord) -> dict[str, Any]:
    # Versions published after the last reconciliation are not served by the other workers yet.
    versions = (model.reconciled or model.entry).versions
    return {
        **wanted_json(model.wanted),
        "override": model.override,
        "overridden": model.overridden,
        "asked": model.asked,
        "versions": sorted(versions.keys() - model.withheld),
        "withheld": sorted(model.withheld & versions.keys()),
        "pinned": model.pinned,
        "source": model.entry.source,
    }


async def restore(
    others: Snapshot,
    models: Mapping[str, ModelRecord],
    reconciler: Reconciler,
    unload: Callable[[str], Awaitable[None]],
    register: Callable[[str, str], object],
) -> None:
    """Make ``models`` serve exactly the versions in the snapshot ``others``."""
    mine = describe(models)
    for name, known in mine.items():
        if name not in others or others[name]["source"] != known["source"]:
            await unload(name)
    for name, asked in others.items():
        if asked["source"] and name not in models:
            with suppress(NotFound, AlreadyExists):  # the repository has changed since
                register(name, asked["source"])
    changed = {
        name: (models[name], asked)
        for name, asked in others.items()
        if name in models and mine.get(name) != asked
    }
    for model, asked in changed.values():
        _apply(model, asked)
    await reconciler.reconcile_all([model for model, _ in changed.values()])
    for model, asked in changed.values():
        model.pinned = asked["pinned"]
        model.select()


def _apply(model: ModelRecord, asked: Mapping[str, Any]) -> None:
    """Apply the settings of a snapshot to ``model``."""
    model.ask(wanted(asked))
    model.override, model.overridden = asked["override"], asked["overridden"]
    model.asked = asked["asked"]
    model.withheld |= set(asked["withheld"])
    if not model.entry.remote:
        model.withheld |= model.entry.versions.keys() - set(asked["versions"])


def _is_requested(model: ModelRecord) -> bool:
    return bool(model.served or model.troubled or model.is_loading or [*model.failures()])


def wanted_json(wanted: VersionSettings) -> dict[str, Any]:
    policy = None
    if wanted.policy is not None:
        specific = wanted.policy.specific
        versions = None if specific is None else sorted(specific)
        policy = {"latest": wanted.policy.latest, "specific": versions}
    return {"policy": policy, "labels": None if wanted.labels is None else dict(wanted.labels)}


def wanted(asked: Mapping[str, Any]) -> VersionSettings:
    policy = None
    if asked["policy"] is not None:
        specific = asked["policy"]["specific"]
        versions = None if specific is None else frozenset(specific)
        policy = VersionPolicy(asked["policy"]["latest"], versions)
    return VersionSettings(policy, asked["labels"])
