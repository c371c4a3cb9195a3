"""A gateway in this process whose requests are observed, and its clients."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from modelport.gateway.server.app import GatewayServer
from modelport.gateway.settings import Settings
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from tests import models
from tests.conformance import decoupled
from tests.polling import until

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
OIP = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
BATCHED = "dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 60000000 }"
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
ensemble_scheduling {
  step { model_name: "x2" model_version: -1
         input_map { key: "x" value: "x" } output_map { key: "y" value: "middle" } }
  step { model_name: "cached" model_version: 1
         input_map { key: "x" value: "middle" } output_map { key: "y" value: "y" } }
}
"""


class ObservedGateway:
    """A running gateway with an HTTP client and a gRPC channel."""

    def __init__(self, server: GatewayServer, http: httpx.AsyncClient, channel: Any) -> None:
        self.server, self.http, self.channel = server, http, channel

    async def infer(self, model: str, **headers: str) -> httpx.Response:
        return await self.http.post(f"/v2/models/{model}/infer", json=OIP, headers=headers)

    async def call(self, model: str, **metadata: str) -> Any:
        call = self.channel.unary_unary(
            INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
        )
        return await call(message(model), metadata=tuple(metadata.items()))


def message(model: str) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=model, id=f"id of {model}")
    tensor = made.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    tensor.contents.fp32_contents.extend([1, 2, 3, 4])
    return made


def repository(folder: Path) -> Path:
    models.repository(folder)
    for name, extra in (
        ("pairs", BATCHED),
        ("cached", "response_cache { enable: true }"),
    ):
        models.multiply(folder / name / "1" / "model.onnx")
        text = models.config(name, ["x FP32 4"], ["y FP32 4"], extra=extra)
        (folder / name / "config.pbtxt").write_text(text)
    decoupled.fake(folder, "repeat", "FP32", "4", responses="3")
    models.fake(folder, "late", "FP32", "4", delay_seconds="30")
    (folder / "both" / "1").mkdir(parents=True)
    (folder / "both" / "config.pbtxt").write_text('name: "both"' + ENSEMBLE)
    return folder


@contextlib.asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[ObservedGateway]:
    chosen = Settings(
        (folder,), http_port=0, grpc_port=0, metrics_port=0, exit_timeout_seconds=0.1,
        cache_bytes=2**20,
    )._replace(**settings)  # fmt: skip
    server = GatewayServer(chosen)
    await server.listen()
    try:
        await server.load()
        ports = server.ports
        url, target = f"http://127.0.0.1:{ports.http_port}", f"127.0.0.1:{ports.grpc_port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=30) as http,
            grpc.aio.insecure_channel(target) as channel,
        ):
            yield ObservedGateway(server, http, channel)
    finally:
        await server.stop()


async def lines(path: Path, count: int) -> list[dict[str, Any]]:
    """The first ``count`` lines of a log."""
    await until(lambda: path.read_text().count("\n") >= count)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == count, found
    return found
