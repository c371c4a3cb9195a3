"""A model on another Open Inference Protocol server: Triton, KServe, MLServer or modelport.

Tensors are sent as raw bytes wherever the server accepts them, so every bit is preserved.
"""

from __future__ import annotations

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.registry import RemoteVersions
from modelport.gateway.backends.remote import backend
from modelport.gateway.backends.remote.backend import RemoteBackend
from modelport.gateway.backends.remote.signature_negotiation import RemoteClient
from modelport.gateway.backends.remote.triton_grpc import TritonGrpcClient
from modelport.gateway.backends.remote.triton_http import TritonHttpClient
from modelport.gateway.repository.routes_file import ModelRoute, UpstreamProtocol


def load(artifact: Artifact) -> RemoteBackend:
    """Load a model of a Triton server; raises as ``backend.load``."""
    return backend.load(artifact, _server)


async def versions(route: ModelRoute, model_name: str) -> RemoteVersions:
    """The versions of a model on a Triton server; raises as ``backend.versions``."""
    return await backend.versions(route, model_name, _server)


def _server(route: ModelRoute, model: str) -> RemoteClient:
    return (TritonGrpcClient if route.protocol is UpstreamProtocol.GRPC else TritonHttpClient)(
        route, model
    )
