"""Plans of rollouts for tests."""

from __future__ import annotations

import uuid
from typing import Any

from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide


def plan(model: str = "fraud", **fields: Any) -> RolloutPlan:
    """A plan from version 2 to version 3 of ``model``, whose stages end without power."""
    fields = {"id": uuid.uuid4().hex, "power": 0.0, "pair": 0.0} | fields
    sides = {"baseline": RolloutSide(model, 2), "candidate": RolloutSide(model, 3)}
    return RolloutPlan(model=model, **{**sides, **fields})
