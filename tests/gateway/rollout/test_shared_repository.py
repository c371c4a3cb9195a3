"""Three gateways that share a rollout in a real folder, and in S3; each leader is killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelport.gateway.errors import NotFound
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.rollout import controller as controllers
from modelport.gateway.rollout.controller import RolloutController
from modelport.gateway.rollout.shared_state.state import RolloutPhase
from modelport.gateway.rollout.shared_state.state_files import RolloutFiles
from modelport.gateway.rollout.shared_state.state_store import RolloutStore
from modelport.gateway.rollout.statistics.decision import decide
from tests.gateway.repository.storage.moto_server import Moto
from tests.gateway.rollout.plans import plan
from tests.gateway.rollout.simulation import SimulatedProcesses

pytestmark = pytest.mark.usefixtures("storage_environment")
STAGES = (0.1, 0.2, 0.5, 1.0)


class RealGateway:
    """A controller on a real store; its processes are simulated."""

    def __init__(self, repository: Path | Location) -> None:
        self.processes = SimulatedProcesses(random.Random(1), time.monotonic)
        self.processes.slow = 0.0
        self.store = RolloutStore(RolloutFiles(repository, 30.0))
        self.controller = RolloutController(self.store, self.processes, decide, lease_seconds=2.0)
        self.task = asyncio.create_task(self.controller.run())

    def kill(self) -> None:
        self.task.cancel()
        self.processes.dead = True


def latest(gateways: list[RealGateway]) -> dict[str, Any]:
    """The latest state that any of the gateways knows."""
    found = []
    for gateway in gateways:
        with contextlib.suppress(NotFound):  # it has just begun
            found.append(gateway.controller.status("fraud"))
    unknown = {"stage": 0, "leader": "", "settled": False}
    return max(found, key=lambda each: each["revision"], default=unknown)


async def until(condition: Callable[[], bool], gateways: list[RealGateway]) -> None:
    """Wait while the gateways serve requests."""
    async with asyncio.timeout(120):
        while not condition():
            for gateway in gateways:
                gateway.processes.serve(1.0, 0.0)
            await asyncio.sleep(0.02)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["folder", "s3"])
async def test_each_leader_is_killed_and_the_rollout_is_promoted_stage_by_stage(
    kind: str, tmp_path: Path, moto: Moto, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path if kind == "folder" else moto.location(uuid.uuid4().hex)
    monkeypatch.setattr(controllers, "FOLLOW_SECONDS", 0.1)
    gateways = [RealGateway(repository) for _ in range(3)]
    wanted = plan(steps=STAGES, min_requests=10, min_seconds=0.1)
    await gateways[0].controller.start(wanted)

    for stage in range(1, len(STAGES)):
        await until(lambda: latest(gateways)["stage"] >= stage, gateways)  # noqa: B023
        leader = latest(gateways)["leader"]
        for dead in [each for each in gateways if each.controller.replica == leader]:
            dead.kill()
            gateways.remove(dead)
            gateways.append(RealGateway(repository))
    await until(lambda: latest(gateways)["settled"], gateways)
    await until(lambda: not any(each.processes.routed for each in gateways), gateways)
    (ended,) = await gateways[0].controller.history("fraud")
    assert ended["phase"] == RolloutPhase.PROMOTED
    assert [event["stage"] for event in ended["events"]] == [0, 1, 2, 3, 3]
    for gateway in gateways:
        gateway.kill()
