"""A watcher of ``grpc.health.v1.Health`` is told of the end, whenever it comes."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from gateway.control import LocalControl
from gateway.dataplane import DataPlane
from gateway.lifecycle import Lifecycle
from gateway.protocols.oip.grpc import HEALTH_SERVICE, OipGrpc
from gateway.protocols.oip.shared_memory import SharedMemory
from gateway.settings import Settings
from gateway.shared_memory import Regions
from gateway.types import NO_DEADLINE


async def test_an_end_that_comes_while_a_status_is_sent_is_told(tmp_path: Path) -> None:
    lifecycle = Lifecycle(Settings((tmp_path,)))
    await lifecycle.start()
    control = LocalControl(lifecycle)
    shared = SharedMemory(Regions(allowed=False), control, 0)
    methods = OipGrpc(DataPlane(lifecycle), lifecycle, control, shared).methods()[HEALTH_SERVICE]
    watch = methods["Watch"].handler(health_pb2.HealthCheckRequest(), NO_DEADLINE)
    assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
    lifecycle.draining.set()
    assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(StopAsyncIteration):
        await anext(watch)
