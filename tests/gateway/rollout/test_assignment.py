"""Assignment by key: even, stable, and different in each rollout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelport.gateway.access.context import CURRENT, AccessContext
from modelport.gateway.access.policy import AccessPolicy
from modelport.gateway.access.principal import ANONYMOUS, Principal
from modelport.gateway.rollout.plan import AssignmentKind
from modelport.gateway.rollout.traffic.assignment import RequestAssignment, position
from modelport.gateway.types import InferRequest
from tests.gateway.rollout.sides import PLAN


def test_keys_are_spread_evenly() -> None:
    tenths = [0] * 10
    for key in range(10_000):
        tenths[int(position(PLAN.id, b"%d" % key) * 10)] += 1
    assert all(850 < count < 1150 for count in tenths)


def test_the_place_of_a_key_is_the_same_in_every_process() -> None:
    assert position("0" * 32, b"customer 7") == pytest.approx(0.897082, abs=1e-6)


def test_two_rollouts_divide_the_keys_differently() -> None:
    both = [position("0" * 32, b"%d" % k) < 0.5 for k in range(1000)]
    other = [position("1" * 32, b"%d" % k) < 0.5 for k in range(1000)]
    assert 400 < sum(a == b for a, b in zip(both, other, strict=True)) < 600


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_share_and_the_whole_share_leave_nothing_to_chance(share: float) -> None:
    assignment = RequestAssignment(PLAN)
    for key in (b"", b"customer 7"):
        assert assignment.candidate_serves(key, share) is (share == 1.0)


@pytest.mark.parametrize(
    ("value", "key"), [(7, b"7"), (True, b"True"), ("\ud800", b"\xed\xa0\x80")]
)
def test_the_key_of_a_parameter_is_its_value(value: int | str, key: bytes) -> None:
    plan = replace(PLAN, assignment=AssignmentKind.PARAMETER, parameter="customer")
    assignment = RequestAssignment(plan)
    assert assignment.key(InferRequest("m", [], parameters={"customer": value})) == key
    assert assignment.key(InferRequest("m", [])) == b""


def test_the_key_of_a_caller_is_its_name_and_anonymous_callers_have_none() -> None:
    assignment = RequestAssignment(replace(PLAN, assignment=AssignmentKind.PRINCIPAL))
    request, policy = InferRequest("m", []), AccessPolicy(())
    assert assignment.key(request) == b""
    for caller, key in ((Principal("jwt:zoë"), "jwt:zoë".encode()), (ANONYMOUS, b"")):
        token = CURRENT.set(AccessContext(policy.rights(caller)))
        assert assignment.key(request) == key
        CURRENT.reset(token)
