"""A selection of the chaos matrix; ``make chaos`` runs the whole of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from modelport.gateway.repository.routes_file import OutlierDetection, UpstreamProtocol
from modelport.gateway.upstream import pool
from tests.faults.chaos import FAULTS, KINDS, ChaosCell, ChaosPlan, run, upstream
from tests.faults.chaos_proxy import ProxyFault
from tests.server import Gateway
from tests.thorough import thorough

QUICK = OutlierDetection(base_ejection_time_seconds=0.1, max_ejection_time_seconds=0.2)
#: Every kind and every fault, each fault at another kind than the one before it.
SELECTION = [(*KINDS[number % len(KINDS)], fault) for number, fault in enumerate(FAULTS)]


#: Of the ways to hang, one is enough for each run.
SLOW = (ProxyFault.HANG_AT_CONNECT, ProxyFault.HANG_AFTER_GREETING, ProxyFault.SLOW)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with upstream() as started:
        yield started


async def cell(
    gateway: Gateway,
    backend: str,
    protocol: UpstreamProtocol,
    fault: ProxyFault,
    monkeypatch: pytest.MonkeyPatch,
    settings: OutlierDetection = QUICK,
) -> ChaosCell:
    monkeypatch.setattr(pool, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(pool, "PROBE_SECONDS", 0.3)
    monkeypatch.setattr(pool, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(pool, "MAX_PROBE_INTERVAL_SECONDS", 0.2)
    plan = ChaosPlan(8, 0.3, 1.3, settings, connect_seconds=2.0, client_seconds=10.0)
    if not settings.enabled:
        plan.client_seconds = 0.3
    return await run(gateway, backend, protocol, fault, plan)


@pytest.mark.parametrize(
    ("backend", "protocol", "fault"),
    [thorough(*each) if each[-1] in SLOW else each for each in SELECTION],
)
async def test_a_broken_endpoint_costs_hardly_any_request_and_comes_back(
    gateway: Gateway,
    backend: str,
    protocol: UpstreamProtocol,
    fault: ProxyFault,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await cell(gateway, backend, protocol, fault, monkeypatch)
    assert found.missed(timed=False) == [], found


async def test_the_check_sees_a_pool_without_outlier_detection(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = OutlierDetection(enabled=False)
    found = await cell(
        gateway, "triton", UpstreamProtocol.GRPC, ProxyFault.HANG_AT_INFERENCE, monkeypatch, off
    )
    assert "ejected" in found.missed(timed=False), found
    assert found.failed >= 8


def test_every_kind_of_route_is_in_the_matrix() -> None:
    assert {(backend, protocol) for backend, protocol, _ in SELECTION} == set(KINDS)
    assert len(KINDS) >= 6
