"""The rollouts of one process: their traffic splits, counts and examples.

They stand before the inference service, and divert the requests of models with a rollout. The
controller of the gateway decides; every process applies the routing that it receives.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from modelport.gateway.errors import NotFound
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.rollout.plan import RolloutPlan, StageKind
from modelport.gateway.rollout.traffic import feedback, request_routing, shadow
from modelport.gateway.rollout.traffic.traffic_split import TrafficSplit
from modelport.gateway.types import Answer, Deadline, InferRequest, InferResponse, finished


class Rollouts:
    """The traffic splits of this process, before ``service``. Only the event loop uses it."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        #: By model; empty while no rollout runs.
        self.splits: dict[str, TrafficSplit] = {}

    # -- requests of clients ----------------------------------------------------------------------

    def infer(self, request: InferRequest, deadline: Deadline, step: bool = False) -> Answer:
        """Answer ``request`` by a side of its model's rollout, or as ``InferenceService.infer``."""
        if step:
            routing = request_routing.CURRENT.get()
            if routing is not None and routing.is_copy:
                return shadow.infer_copy(self._service, request, deadline)
        split = self._split_of(request) if self.splits else None
        if split is None or (self._service.closing and not step):
            return self._service.infer(request, deadline, step)
        return split.infer(request, self._service.limited(deadline), step)

    async def stream(
        self, request: InferRequest, deadline: Deadline, step: bool = False
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses to ``request``, as ``InferenceService.stream``.

        No rollout diverts the requests of a decoupled model.
        """
        if self._split_of(request) is not None and not self._service.is_decoupled(request):
            yield await finished(self.infer(request, deadline, step))
            return
        async with aclosing(self._service.stream(request, deadline, step)) as responses:
            async for response in responses:
                yield response

    def refuses(self, name: str, number: int) -> bool:
        return self._service.refuses(name, number)

    def _split_of(self, request: InferRequest) -> TrafficSplit | None:
        split = self.splits.get(request.model_name)
        return split if split is not None and split.diverts(request) else None

    # -- rollouts ---------------------------------------------------------------------------------

    def apply(self, document: Mapping[str, Any]) -> None:
        """Route the traffic of a model as ``document`` says, for every request from now on.

        The document has the ``model``, the ``plan``, the ``stage``'s index, its ``kind`` and
        ``share``. A share of 0 sends everything to the baseline, and so does the monotonic time
        ``until``, if there is one.
        """
        model = str(document["model"])
        split = self.splits.get(model)
        if split is None or split.plan.id != document["plan"]["id"]:
            plan = RolloutPlan.from_json(document["plan"])
            if split is not None:
                split.close()
            split = TrafficSplit(plan, self._service)
        kind, share = StageKind(document["kind"]), float(document["share"])
        until = document.get("until")
        split.route(int(document["stage"]), kind, share, math.inf if until is None else until)
        self.splits[model] = split

    def remove(self, model: str) -> None:
        """Forget the rollout of ``model``; its requests go to the default version again.

        Requests in flight finish where they are.
        """
        split = self.splits.pop(model, None)
        if split is not None:
            split.close()

    def feedback(self, model: str, rows: Any, complete: bool = False) -> dict[str, Any]:
        """Count labels that came later.

        Return how many, and the indices of rows of ``unknown`` requests, and of those that were
        counted before (``repeated``).

        Without ``complete``, rows count whose requests this process has answered and remembers.
        With it, rows count that say themselves what was predicted by which ``model_version``;
        only one process of a gateway must get those.

        Raises:
            InvalidArgument: a row is malformed. Rows before it may have been counted, and are not
                counted again.
            NotFound: the model has no rollout in this process.
        """
        split = self.splits.get(model)
        if split is None:
            raise NotFound(f"no rollout of model '{model}' is running")
        found: dict[str, Any] = {"counted": 0, "unknown": [], "repeated": []}
        for index, row in enumerate(feedback.check(rows)):
            if split.learn(row, complete):
                found["counted"] += 1
            else:
                found["repeated" if split.has_label(row["id"]) else "unknown"].append(index)
        return found

    def examples(self, model: str) -> list[dict[str, Any]]:
        """The first requests of the rollout of ``model`` whose answers disagreed."""
        split = self.splits.get(model)
        return [] if split is None else list(split.examples)

    def counts(self) -> dict[str, dict[str, Any]]:
        """The counts of each rollout since it began in this process, by id and stage.

        With them, the ``problem`` if it compares nothing.
        """
        for split in self.splits.values():
            split.settle()
        return {
            split.plan.id: {
                "stages": {str(index): counts.to_json() for index, counts in split.counts.items()},
                "problem": split.problem,
            }
            for split in self.splits.values()
        }
