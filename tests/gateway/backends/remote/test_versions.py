"""Versions of a server that is still loading models: more of them may become READY."""

from __future__ import annotations

from typing import Any

import pytest

from modelport.gateway.backend_registry import RemoteVersions, find_versions
from modelport.gateway.repository.routes_file import ModelRoute, UpstreamProtocol
from modelport.gateway.wire.proto import grpc_service_pb2 as oip
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.proto import torchserve_inference_pb2 as ts
from tests.gateway.backends.remote.test_hostile_servers import (
    Fake,
    Status,
    grpc_server,
    http_server,
)

READY, STARTING = {"status": "READY"}, {"status": "UNLOADED"}
SERVERS = {UpstreamProtocol.GRPC: grpc_server, UpstreamProtocol.HTTP: http_server}


def triton(state: str, what: str) -> Any:
    """A Triton whose health is ``state``, which is not a method of every server."""
    if what == "/v2/health/ready":
        return {"ready": b"", "starting": (400, b""), "unknown": (404, b"")}[state]
    if what == "ServerReady":
        if state == "unknown":
            return Status("UNIMPLEMENTED", "no such method")
        return oip.ServerReadyResponse(ready=state == "ready").SerializeToString()
    if what == "ModelMetadata":
        return oip.ModelMetadataResponse(name="m", versions=["2"]).SerializeToString()
    return {"name": "m", "versions": ["2"], "inputs": [], "outputs": []}


def tfserving(state: str, what: str) -> Any:
    """A TensorFlow Serving with version 1 in this state."""
    if what == "GetModelStatus":
        reply = pb.GetModelStatusResponse()
        for version, each in ((2, "AVAILABLE"), (1, state)):
            number = pb.ModelVersionStatus.State.Value(each)
            reply.model_version_status.add(version=version, state=number)
        return reply.SerializeToString()
    rows = [{"version": "2", "state": "AVAILABLE"}, {"version": "1", "state": state}]
    return {"model_version_status": rows}


def torchserve(state: str, what: str) -> Any:
    """A TorchServe that starts the worker of version 1, or has none for it."""
    if what.startswith("/models/m"):
        workers = [STARTING] if state == "starting" else []
        return [
            {"modelVersion": "2", "workers": [READY, STARTING]},
            {"modelVersion": "1", "workers": workers},
        ]
    return {} if what.startswith("/") else ts.TorchServeHealthResponse().SerializeToString()


@pytest.mark.parametrize("protocol", SERVERS)
@pytest.mark.parametrize(
    ("server", "state", "loading"),
    [
        (triton, "starting", True),
        (triton, "ready", False),
        (triton, "unknown", False),
        (tfserving, "START", True),
        (tfserving, "LOADING", True),
        (tfserving, "END", False),
        (torchserve, "starting", True),
        (torchserve, "without", False),
    ],
)
async def test_a_server_that_is_loading_says_so(
    protocol: UpstreamProtocol, server: Any, state: str, loading: bool
) -> None:
    fake, management = Fake(), Fake()
    fake.tell = management.tell = lambda what: server(state, what)
    async with SERVERS[protocol](fake), http_server(management):
        backend = server.__name__
        route = ModelRoute(backend, (fake.address,), protocol=protocol)
        if backend == "torchserve":
            route = route._replace(management=management.address)
        find = find_versions(backend)
        assert await find(route, "m") == RemoteVersions([2], loading)
        if backend == "triton":
            assert await find(route._replace(version="2"), "m") == RemoteVersions([2])
