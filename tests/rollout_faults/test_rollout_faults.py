"""Some of the rollouts of ``make rollout-faults``, and one gateway that must be caught."""

from __future__ import annotations

import os

import pytest

from tests.rollout_faults.__main__ import caught
from tests.rollout_faults.scenario import FaultScenario, RolloutFault, run

pytestmark = pytest.mark.skipif(
    not os.environ.get("MODELPORT_SLOW_TESTS"), reason="slow; `make rollout-faults` runs more"
)


@pytest.mark.parametrize(
    "fault", [fault for fault in RolloutFault if fault is not RolloutFault.NONE]
)
def test_a_rollout_keeps_its_promises_during_a_fault(fault: RolloutFault) -> None:
    result = run(FaultScenario.drawn(7, fault))
    assert result.violations == []


def test_a_gateway_that_begins_again_after_a_restart_is_caught() -> None:
    found, result = caught("begins_again")
    assert found, result.violations
