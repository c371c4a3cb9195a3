"""Known-bad gateways: ``modelport`` with one function replaced.

Each breaks one promise about rollouts, and the checks must find it:
``python -m tests.rollout_faults.broken_gateway VARIANT serve …``.
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from modelport.gateway.rollout import controller
from modelport.gateway.rollout.shared_state import replicated_rollout, state_store
from modelport.gateway.rollout.traffic import (
    assignment,
    participant,
    request_events,
    request_routing,
    rollouts,
    traffic_split,
)
from modelport.gateway.types import Deadline

Patch = Callable[[], None]


def ignores_the_stop() -> None:
    """The split goes on after a rollback, which is recorded as done."""
    original = rollouts.Rollouts.apply

    def apply(self: Any, document: Mapping[str, Any]) -> None:
        if document["share"]:
            original(self, document)

    rollouts.Rollouts.apply = apply  # type: ignore[method-assign]
    rollouts.Rollouts.remove = lambda self, model: None  # type: ignore[method-assign]


def lets_some_through() -> None:
    """One request in each 20 ms goes to the candidate after a stop."""
    original_infer, original_route = (
        traffic_split.TrafficSplit.infer,
        traffic_split.TrafficSplit.route,
    )
    stops: dict[str, float] = {}

    def route(self: Any, number: int, kind: Any, share: float, *rest: Any) -> None:
        original_route(self, number, kind, share, *rest)
        if share or stops.get(self.plan.id, math.inf) == math.inf:  # routes are applied repeatedly
            stops[self.plan.id] = math.inf if share else time.monotonic()

    def infer(self: Any, request: Any, deadline: Deadline, step: bool = False) -> Any:
        if time.monotonic() <= stops.get(self.plan.id, math.inf) + 0.02:
            return original_infer(self, request, deadline, step)
        stops[self.plan.id] = time.monotonic()
        assigned = request_events.AssignedRequest(self._stage, True, "")
        diverted = traffic_split._DivertedRequest(
            request, deadline, step, assigned, time.monotonic()
        )
        return self._by_candidate(diverted)

    traffic_split.TrafficSplit.route = route  # type: ignore[method-assign]
    traffic_split.TrafficSplit.infer = infer  # type: ignore[method-assign]
    rollouts.Rollouts.remove = lambda self, model: None  # type: ignore[method-assign]


def forgets_the_key() -> None:
    """Each request of a sticky assignment is assigned by itself."""
    assignment.position = lambda rollout, key: random.random()


def diverts_no_label() -> None:
    """Requests for the label of the baseline stay there."""
    original = traffic_split.TrafficSplit.diverts

    def diverts(self: Any, request: Any) -> bool:
        return not request.label and original(self, request)

    traffic_split.TrafficSplit.diverts = diverts  # type: ignore[method-assign]


def has_no_lease() -> None:
    """A gateway that was stopped goes on as before when it continues."""
    original = rollouts.Rollouts.apply

    def apply(self: Any, document: Mapping[str, Any]) -> None:
        original(self, {**document, "until": None})

    rollouts.Rollouts.apply = apply  # type: ignore[method-assign]
    participant.RolloutParticipant._suspend = lambda self, model: None  # type: ignore[method-assign]
    replicated_rollout.ReplicatedRollout.doubtful = False  # type: ignore[assignment,method-assign]


def begins_again() -> None:
    """A restart goes back to the first stage."""
    original = controller.RolloutController.begin

    async def begin(self: Any) -> None:
        await original(self)
        for rollout in self._states:
            rollout.state = dataclasses.replace(rollout.state, stage=0)

    controller.RolloutController.begin = begin  # type: ignore[method-assign]


def forgets_counts() -> None:
    """Nothing is stored of what was counted."""

    async def write_counts(*_: Any) -> None:
        pass

    state_store.RolloutStore.write_counts = write_counts  # type: ignore[assignment,method-assign]


def forgets_the_verdict() -> None:
    """No rollout gets into the history."""

    async def archive(*_: Any) -> None:
        pass

    state_store.RolloutStore.archive = archive  # type: ignore[assignment,method-assign]


def leaves_failures_to_the_client() -> None:
    """The baseline does not answer for a candidate that fails."""

    async def fall_back(self: Any, diverted: Any, error: Exception) -> Any:
        raise error

    traffic_split.TrafficSplit._fall_back = fall_back  # type: ignore[method-assign]


def names_the_baseline() -> None:
    """The candidate's answers are said to be the baseline's."""
    original = traffic_split.TrafficSplit._by_candidate

    async def by_candidate(self: Any, diverted: Any) -> Any:
        response = await original(self, diverted)
        response.model_version = self.plan.baseline.version
        routing = request_routing.CURRENT.get()
        if routing is not None:
            routing.answered = str(self.plan.baseline.version)
        return response

    traffic_split.TrafficSplit._by_candidate = by_candidate  # type: ignore[method-assign]


def diverts_named_versions() -> None:
    """Requests for the baseline by number are split as well."""
    original = traffic_split.TrafficSplit.diverts

    def diverts(self: Any, request: Any) -> bool:
        return original(self, request) or request.model_version == self.plan.baseline.version

    traffic_split.TrafficSplit.diverts = diverts  # type: ignore[method-assign]


VARIANTS: dict[str, Patch] = {
    patch.__name__: patch
    for patch in (
        ignores_the_stop, lets_some_through, forgets_the_key, diverts_no_label,
        has_no_lease, begins_again, forgets_counts, forgets_the_verdict,
        leaves_failures_to_the_client, names_the_baseline, diverts_named_versions,
    )
}  # fmt: skip


def main() -> None:
    VARIANTS[sys.argv.pop(1)]()
    from modelport.cli import main

    main()


if __name__ == "__main__":
    main()
