"""Watchers of ``grpc.health.v1.Health``: what they are told, and what they cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from modelport.gateway.inference.shared_memory import SharedMemoryRegions
from modelport.gateway.models.control import LocalControl
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.oip import grpc_health
from modelport.gateway.protocols.oip.grpc import OipGrpc
from modelport.gateway.protocols.oip.shared_memory import SharedMemory
from modelport.gateway.settings import Settings, TraceConfig
from modelport.gateway.telemetry.request_record import RequestObserver
from modelport.gateway.telemetry.tfserving_counters import TfServingRequests
from modelport.gateway.telemetry.tracer import Tracer
from modelport.gateway.types import NO_DEADLINE


async def test_a_shutdown_during_the_sending_of_a_status_is_reported(tmp_path: Path) -> None:
    manager = ModelManager(Settings((tmp_path,)))
    await manager.start()
    control = LocalControl(manager)
    shared = SharedMemory(SharedMemoryRegions(allowed=False), control, 0)
    host = DialectHost(
        Settings(()),
        InferenceService(manager),
        manager,
        control,
        shared,
        TfServingRequests(),
        Tracer(TraceConfig(), RequestObserver()),
    )
    methods = OipGrpc(host).methods()[grpc_health.SERVICE]
    watch = methods["Watch"].handler(health_pb2.HealthCheckRequest(), NO_DEADLINE)
    assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
    manager.draining.set()
    assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


class CountingControl:
    """A control that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_ready = True

    async def ready(self) -> bool:
        self.asked += 1
        return self.is_ready


WATCHERS = 500
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_however_many_watch_readiness_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_health, "WATCH_SECONDS", 0.01)
    control, draining = CountingControl(), asyncio.Event()
    health = grpc_health.HealthGrpc(control, draining, ())  # type: ignore[arg-type]
    handler = health.methods()[grpc_health.SERVICE]["Watch"].handler
    told: list[list[int]] = [[] for _ in range(WATCHERS)]

    async def watch(statuses: list[int]) -> None:
        replies: AsyncIterator[Any] = handler(health_pb2.HealthCheckRequest(), NO_DEADLINE)
        async for reply in replies:
            statuses.append(reply.status)  # noqa: PERF401

    async def all_told(*statuses: int) -> None:
        while told != [list(statuses)] * WATCHERS:
            await asyncio.sleep(0.001)

    watching = [asyncio.ensure_future(watch(statuses)) for statuses in told]
    await all_told(SERVING)
    asked = control.asked
    while control.asked < asked + 5:
        await asyncio.sleep(0.001)
    assert control.asked < WATCHERS / 10
    control.is_ready = False
    await all_told(SERVING, NOT_SERVING)
    control.is_ready = True
    await all_told(SERVING, NOT_SERVING, SERVING)
    draining.set()
    await asyncio.gather(*watching)
    assert told == [[SERVING, NOT_SERVING, SERVING, NOT_SERVING]] * WATCHERS


async def test_readiness_is_not_polled_without_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_health, "WATCH_SECONDS", 0.0)
    control = CountingControl()
    readiness = grpc_health.Readiness(control, asyncio.Event())  # type: ignore[arg-type]
    before = asyncio.all_tasks()
    for _ in range(2):
        changes = readiness.changes()
        assert await anext(changes) is True
        await changes.aclose()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
