"""Plans of rollouts for tests."""

from __future__ import annotations

import uuid
from typing import Any

from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide


def plan(model: str = "fraud", **fields: Any) -> RolloutPlan:
    """A plan from version 2 to version 3 of ``model``."""
    fields.setdefault("id", uuid.uuid4().hex)
    sides = {"baseline": RolloutSide(model, 2), "candidate": RolloutSide(model, 3)}
    return RolloutPlan(model=model, **{**sides, **fields})
