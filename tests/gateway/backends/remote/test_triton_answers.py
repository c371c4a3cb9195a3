"""Answers of a Triton elsewhere: what its backends may leave out, and what they may not."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from modelport.gateway.backends.remote import triton
from modelport.gateway.errors import Internal
from modelport.gateway.repository import config
from modelport.gateway.repository.routes_file import UpstreamProtocol
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from tests import models
from tests.gateway.backends.remote.test_hostile_servers import (
    Fake,
    grpc_server,
    http_server,
    loaded,
    refused,
)

CONFIG = config.complete(
    config.parse(models.config("m", ["x FP32 -1"], ["y FP32 -1", "z BYTES -1,2"], 0, "triton")), "m"
)
Y = {"name": "y", "datatype": "FP32", "shape": [2], "data": [1.5, -2.0]}
EMPTY = {"name": "z", "datatype": "FP64", "shape": [0], "data": []}
#: name → outputs, and what the gateway makes of them: the shapes by name, or the reason.
ANSWERS: dict[str, tuple[list[dict[str, Any]], dict[str, tuple[int, ...]] | str]] = {
    "an output left out": ([Y], {"y": (2,)}),
    "an empty one of another datatype": ([Y, EMPTY], {"y": (2,), "z": (0,)}),
    "one of another datatype": (
        [Y, {**EMPTY, "shape": [1], "data": [1.0]}],
        "output 'z' is not BYTES",
    ),
    "an unknown one": ([Y, {**EMPTY, "name": "q"}], "it has an output unknown to the model"),
    "one twice": ([Y, Y], "it repeats an output"),
    "a negative size": ([Y, {**EMPTY, "shape": [0, -1]}], "output 'z' is not BYTES"),
}


@contextlib.asynccontextmanager
async def over_http(outputs: list[dict[str, Any]]) -> AsyncIterator[Callable[..., Any]]:
    fake = Fake()
    tensors = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}],
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [-1]},
            {"name": "z", "datatype": "BYTES", "shape": [-1, 2]},
        ],
    }
    fake.tell = lambda path: {"name": "m", "versions": ["1"], "platform": "", **tensors}
    fake.infer = {"model_name": "m", "model_version": "1", "outputs": outputs}
    http = {"protocol": UpstreamProtocol.HTTP}
    async with http_server(fake), loaded(triton, fake, CONFIG, whole=True, **http) as ask:
        yield ask


@contextlib.asynccontextmanager
async def over_grpc(outputs: list[dict[str, Any]]) -> AsyncIterator[Callable[..., Any]]:
    fake = Fake()

    def tell(method: str) -> bytes:
        if method == "ModelReady":
            return bytes(pb.ModelReadyResponse(ready=True).SerializeToString())
        if method == "ModelConfig":
            return b""
        told = pb.ModelMetadataResponse(name="m", versions=["1"])
        told.inputs.add(name="x", datatype="FP32", shape=[-1])
        told.outputs.add(name="y", datatype="FP32", shape=[-1])
        told.outputs.add(name="z", datatype="BYTES", shape=[-1, 2])
        return bytes(told.SerializeToString())

    reply = pb.ModelInferResponse(model_name="m", model_version="1")
    for item in outputs:
        output = reply.outputs.add(
            name=item["name"], datatype=item["datatype"], shape=item["shape"]
        )
        kind = "fp32_contents" if item["datatype"] == "FP32" else "fp64_contents"
        getattr(output.contents, kind).extend(item["data"])
    fake.tell, fake.infer = tell, reply.SerializeToString()
    async with grpc_server(fake), loaded(triton, fake, CONFIG, whole=True) as ask:
        yield ask


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("over", [over_http, over_grpc])
async def test_what_a_triton_leaves_out_or_leaves_empty(over: Any, name: str) -> None:
    outputs, expected = ANSWERS[name]
    async with over(outputs) as ask:
        if isinstance(expected, str):
            await refused(ask, Internal, expected)
        else:
            response = await ask()
            assert {t.name: t.data.shape for t in response.outputs} == expected
            assert [t.datatype for t in response.outputs] == ["FP32", "BYTES"][: len(expected)]
