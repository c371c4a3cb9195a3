"""How the models stand: what a process that starts later must know to serve the same as the others.

It is told in JSON values: ``describe`` in one process, ``restore`` in another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from modelport.gateway.models.model import ModelRecord, VersionSettings, VersionState
from modelport.gateway.models.reconciler import Reconciler
from modelport.gateway.models.version_policy import VersionPolicy

#: model → what is asked of it. Models that nobody asks for are not in it.
Snapshot = Mapping[str, Mapping[str, Any]]


def describe(models: Mapping[str, ModelRecord]) -> dict[str, dict[str, Any]]:
    return {name: _of(model) for name, model in models.items() if _is_asked_for(model)}


def _of(model: ModelRecord) -> dict[str, Any]:
    # A version that was published since is nothing that the others serve.
    versions = (model.reconciled or model.entry).versions
    return {
        **wanted_json(model.wanted),
        "override": model.override,
        "asked": model.asked,
        "versions": sorted(versions.keys() - model.withheld),
        "withheld": sorted(model.withheld & versions.keys()),
        "pinned": model.pinned,
    }


async def restore(
    others: Snapshot,
    models: Mapping[str, ModelRecord],
    reconciler: Reconciler,
    unload: Callable[[str], Awaitable[None]],
) -> None:
    """Serve of ``models`` what ``others`` do, and nothing else."""
    mine = describe(models)
    for name in mine.keys() - others.keys():
        await unload(name)
    changed = {
        name: (models[name], asked)
        for name, asked in others.items()
        if name in models and mine.get(name) != asked
    }
    for model, asked in changed.values():
        _ask(model, asked)
    await reconciler.reconcile_all([model for model, _ in changed.values()])
    for model, asked in changed.values():
        model.pinned = asked["pinned"]
        model.select()


def _ask(model: ModelRecord, asked: Mapping[str, Any]) -> None:
    """Ask of ``model`` what was asked of the other."""
    model.ask(wanted(asked), asked["override"])
    model.asked = asked["asked"]
    model.withheld |= set(asked["withheld"])
    if not model.entry.remote:
        model.withheld |= model.entry.versions.keys() - set(asked["versions"])


def _is_asked_for(model: ModelRecord) -> bool:
    loading = any(state is VersionState.LOADING for state, _ in model.states.values())
    return bool(model.served) or model.troubled or loading or any(True for _ in model.failures())


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
