"""The sides of a rollout in traffic: the routing of a stage, and requests addressed to a side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from modelport.gateway.rollout.plan import RolloutSide, StageKind
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.types import InferRequest, Tensor, Timing


class StageTraffic(NamedTuple):
    """The routing of one stage, and its counts."""

    number: int
    kind: StageKind
    share: float
    counts: StageCounts

    @property
    def canary_share(self) -> float:
        """The share of requests that the candidate answers."""
        return self.share if self.kind is StageKind.CANARY else 0.0


def copies_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors with the same data, for code that reshapes them."""
    return [Tensor(each.name, each.datatype, each.data) for each in tensors]


def addressed(request: InferRequest, side: RolloutSide) -> InferRequest:
    """A copy of ``request`` for ``side``, because validation reshapes a request's tensors."""
    return replace(
        request,
        model_name=side.model,
        model_version=side.version,
        label=None,
        inputs=copies_of(request.inputs),
        timing=Timing(),
    )
