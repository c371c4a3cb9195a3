"""The limits of a rollout in ``slo.toml``, which the gate reads, too."""

from __future__ import annotations

import dataclasses
from typing import Any

from modelport.gateway.rollout.plan import RolloutLimits
from modelport.gateway.slo import Slo


def limits_of(slo: Slo) -> RolloutLimits:
    """The limits that a rollout measures.

    Those with another default than the gate's count only if the file says them. Without ``atol``
    and ``rtol`` in the file they are 0, and the caller takes the certificates'.

    Raises:
        InvalidArgument: a limit is out of the range that a rollout can test.
    """
    said = {
        key: getattr(getattr(slo, table), key)
        for table, _, key in (name.partition(".") for name in slo.said)
        if table in ("limits", "regressions", "verdict", "answers")
    }
    known = {each.name for each in dataclasses.fields(RolloutLimits)}
    return RolloutLimits(**{key: value for key, value in said.items() if key in known})


def stage_conditions(slo: Slo) -> dict[str, Any]:
    """The fields of ``RolloutPlan`` for the least and longest stage."""
    return dataclasses.asdict(slo.rollout)
