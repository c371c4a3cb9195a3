"""A gateway in this process, with two versions of a model that answer differently."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from modelport.gateway.models.next_action import VersionHold
from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.server.app import GatewayServer
from modelport.gateway.settings import Settings, VertexAi
from tests.models import multiply

CONFIG = """
name: "m"
backend: "onnxruntime"
max_batch_size: 8
version_policy { all {} }
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
parameters { key: "version_label.stable" value { string_value: "1" } }
parameters { key: "version_label.other" value { string_value: "1" } }
"""
PLAN = RolloutPlan(
    "0" * 32, "m", RolloutSide("m", 1), RolloutSide("m", 2), default_version=1, pair=0.0
)


class RolloutGateway:
    """Version 1 of model ``m`` doubles and is the default, version 2 triples."""

    def __init__(
        self, server: GatewayServer, http: httpx.AsyncClient, channel: grpc.aio.Channel
    ) -> None:
        self.server, self.http, self.channel = server, http, channel
        self.plan = PLAN
        self._revision = 0

    def apply(self, share: float, kind: str = "canary", stage: int = 0, **plan: Any) -> None:
        if (changed := replace(self.plan, **plan)) != self.plan:
            content = repr(replace(changed, id=PLAN.id))
            self.plan = replace(changed, id=uuid.uuid5(uuid.NAMESPACE_OID, content).hex)
        self._revision += 1
        self.server.rollouts.apply(
            {
                "model": self.plan.model, "plan": self.plan.to_json(), "stage": stage, "kind": kind,
                "share": share, "revision": self._revision,
            }
        )  # fmt: skip

    def counts(self, stage: int = 0) -> StageCounts:
        document = self.server.rollouts.counts()[self.plan.id]["stages"][str(stage)]
        return StageCounts.from_json(document)


def repository(folder: Path) -> Path:
    for number, factor in ((1, 2.0), (2, 3.0)):
        multiply(folder / "m" / str(number) / "model.onnx", factor)
    (folder / "m" / "config.pbtxt").write_text(CONFIG)
    return folder


@contextlib.asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[RolloutGateway]:
    chosen = Settings(
        (folder,), http_port=0, grpc_port=0, metrics_port=0, exit_timeout_seconds=1.0,
        vertex_ai=VertexAi("/vertex", "/vertex-health", "m"), sagemaker_default_model="m",
    )._replace(**settings)  # fmt: skip
    server = GatewayServer(chosen)
    server.manager.held.expect("m", VersionHold((1, 2), 1))
    await server.listen()
    try:
        await server.load()
        ports = server.ports
        url, target = f"http://127.0.0.1:{ports.http_port}", f"127.0.0.1:{ports.grpc_port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=30) as http,
            grpc.aio.insecure_channel(target) as channel,
        ):
            yield RolloutGateway(server, http, channel)
    finally:
        await server.stop()
