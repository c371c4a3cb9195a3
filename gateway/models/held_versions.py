"""Versions that rollouts keep served, whatever the version policy says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import chain

from modelport.gateway.errors import InvalidArgument, ModelportError, NotFound, Unavailable
from modelport.gateway.models.model import ModelRecord
from modelport.gateway.models.model_config import version_labels
from modelport.gateway.models.next_action import NO_HOLD, VersionHold
from modelport.gateway.models.reconciler import Reconciler
from modelport.gateway.repository.version_choice import chosen_default
from modelport.gateway.repository.version_policy import VersionPolicy


class HeldVersions:
    """The holds by model. Without a hold, a model follows its policy again."""

    def __init__(
        self,
        models: Mapping[str, ModelRecord],
        reconciler: Reconciler,
        scan: Callable[[str], Awaitable[object]],
    ) -> None:
        self._models = models
        self._reconciler = reconciler
        self._scan = scan
        #: By model, then by rollout: two may have one model as their candidate. Models may be held
        #: before they are found.
        self._holds: dict[str, dict[str, VersionHold]] = {}

    def of(self, name: str) -> VersionHold:
        """The hold of all rollouts; the default is that of the first which has one."""
        holds = self._holds.get(name, {}).values()
        if not holds:
            return NO_HOLD
        versions = dict.fromkeys(chain.from_iterable(each.versions for each in holds))
        default = next((each.default for each in holds if each.default), 0)
        return VersionHold(tuple(versions), default, all(each.kept for each in holds))

    def names(self) -> list[str]:
        return list(self._holds)

    def expect(self, name: str, hold: VersionHold, rollout: str = "") -> None:
        """Hold versions of a model from its next reconciliation on; before the models load."""
        others = {key: each for key, each in self._holds.get(name, {}).items() if not each.kept}
        self._holds[name] = {**others, rollout: hold}
        self._apply(name)

    async def hold(self, name: str, hold: VersionHold, rollout: str = "") -> None:
        """Find and load the versions of ``hold``, and keep them served until ``release``.

        Raises:
            NotFound: there is no such model or version.
            InvalidArgument: a version does not load.
            Unavailable: a dependency of a version is missing.
        """
        await asyncio.shield(self._reconciler.in_background(self._hold(name, hold, rollout)))

    async def _hold(self, name: str, hold: VersionHold, rollout: str) -> None:
        self.expect(name, hold, rollout)
        model = self._models.get(name)
        if model is not None and all(number in model.served for number in hold.versions):
            model.select()
            return
        await self._scan(name)
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        for number in hold.versions:  # an earlier failure is no reason not to try again
            model.failed.pop(number, None)
        await self._reconciler.reconcile(model)
        await model.settled.wait()
        missing = [number for number in hold.versions if number not in model.served]
        if missing:
            raise _reason(model, missing[0])

    async def release(
        self,
        name: str,
        version: int = 0,
        other: int = 0,
        label: str = "",
        default: bool = False,
        *,
        rollout: str = "",
    ) -> None:
        """Drop the hold of a rollout; if it ends, ``version`` is served in place of ``other``.

        The configuration in the repository says so already. What requests have set in memory
        (a default version, a version policy, labels) is changed accordingly.

        Args:
            version: 0: the hold leaves no trace.
            label: the label that names ``version`` now; empty: none has moved.
            default: whether requests without a version get ``version``.
        """

        async def work() -> None:
            with contextlib.suppress(ModelportError):  # without it, the memory is changed instead
                await self._scan(name)
            self._drop(name, rollout)
            model = self._models.get(name)
            if model is None:
                return
            if version:
                self._choose(model, version, other, label, default)
            self._apply(name)
            await self._reconciler.reconcile(model)
            if model.pinned == model.unpinned:  # newer versions may replace it
                model.pinned = 0

        await asyncio.shield(self._reconciler.in_background(work()))

    def _choose(
        self, model: ModelRecord, version: int, other: int, label: str, default: bool
    ) -> None:
        """Change the settings of earlier requests so that ``version`` is chosen."""
        try:
            config = model.read_config()
        except InvalidArgument:  # reported when the model is reconciled
            return
        labels = model.wanted.labels
        declared = version_labels(config) if labels is None else dict(labels)
        if label and declared.get(label) != version:
            model.wanted = model.wanted._replace(labels={**declared, label: version})
        if default:
            model.pinned = version
        policy = model.wanted.policy or VersionPolicy.of(config.version_policy)
        available = model.entry.versions
        chosen, configured = policy.chosen(available), chosen_default(config)
        if not chosen:
            return
        before = configured if configured in chosen else chosen[0]
        named = set((model.wanted.labels or declared).values()) & available.keys()
        after = version if default else before
        wanted = policy.preferring(available, before, after, other, named)
        if wanted != policy:
            model.pinned = after
            model.wanted = model.wanted._replace(policy=wanted)

    def free(self, names: Iterable[str]) -> None:
        """Drop the holds on these models.

        Raises:
            Unavailable: one of the models is part of a rollout that is running.
        """
        for name in names:
            hold = self.of(name)
            if hold.kept:
                del self._holds[name]
                self._apply(name)
            elif hold.versions:
                raise Unavailable(
                    f"model '{name}' is part of a rollout that is running; end that first: "
                    "modelport rollout rollback"
                )

    def _drop(self, name: str, rollout: str) -> None:
        holds = self._holds.get(name, {})
        holds.pop(rollout, None)
        if not holds:
            self._holds.pop(name, None)

    def _apply(self, name: str) -> None:
        if name in self._models:
            self._models[name].hold = self.of(name)


def _reason(model: ModelRecord, number: int) -> Exception:
    """The error for a version that is not served."""
    name = model.entry.name
    if number not in model.entry.versions:
        known = ", ".join(map(str, sorted(model.entry.versions))) or "none"
        return NotFound(f"model '{name}' has no version {number}; it has {known}")
    failure = model.failed.get(number)
    reason = failure.reason if failure is not None else model.problem or "it is not loaded"
    kind = Unavailable if failure is not None and failure.transient else InvalidArgument
    return kind(f"version {number} of model '{name}' cannot be served: {reason}")
