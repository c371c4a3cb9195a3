"""A model that another Open Inference Protocol server runs: Triton, KServe, MLServer, modelport.

Tensors travel as raw bytes wherever the server takes them, so values arrive bit by bit.
"""

from __future__ import annotations

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.remote import backend
from modelport.gateway.backends.remote.backend import RemoteBackend
from modelport.gateway.backends.remote.negotiation import Server
from modelport.gateway.backends.remote.triton_grpc import GrpcServer
from modelport.gateway.backends.remote.triton_http import HttpServer
from modelport.gateway.repository.routes import Protocol, Route


def load(artifact: Artifact) -> RemoteBackend:
    """As ``backend.load``."""
    return backend.load(artifact, _server)


async def versions(route: Route, model_name: str) -> list[int]:
    """As ``backend.versions``."""
    return await backend.versions(route, model_name, _server)


def _server(route: Route, model: str) -> Server:
    return (GrpcServer if route.protocol is Protocol.GRPC else HttpServer)(route, model)
