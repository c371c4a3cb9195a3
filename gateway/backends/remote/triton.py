"""A model that another Open Inference Protocol server runs: Triton, KServe, MLServer, modelport.

Tensors travel as raw bytes wherever the server takes them, so values arrive bit by bit.
"""

from __future__ import annotations

from gateway.backends.base import Artifact
from gateway.backends.remote import backend
from gateway.backends.remote.agreement import Server
from gateway.backends.remote.backend import RemoteBackend
from gateway.backends.remote.triton_grpc import GrpcServer
from gateway.backends.remote.triton_http import HttpServer
from gateway.routes import Protocol, Route


def load(artifact: Artifact) -> RemoteBackend:
    """As ``backend.load``."""
    return backend.load(artifact, _server)


async def versions(route: Route, model_name: str) -> list[int]:
    """As ``backend.versions``."""
    return await backend.versions(route, model_name, _server)


def _server(route: Route, model: str) -> Server:
    return (GrpcServer if route.protocol is Protocol.GRPC else HttpServer)(route, model)
