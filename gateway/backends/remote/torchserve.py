"""A model on TorchServe: an archive of ``modelport package --for torchserve``, or any other.

modelport's archives use the body of the Open Inference Protocol with raw tensors. Their signature
comes from ``config.pbtxt`` (the repository's, or the route's ``config``), or from the archive
itself if the route names TorchServe's ``management`` API. A model without any description has one
BYTES input ``data`` of shape [1], the body of a prediction, and one BYTES output ``output``, the
response body.

TorchServe's versions are text; ``1.0`` and the like are the number 1 here. Without the management
API they are unknown: then there is version 1, which is TorchServe's default version.
"""

from __future__ import annotations

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.registry import RemoteVersions
from modelport.gateway.backends.remote import backend
from modelport.gateway.backends.remote.backend import RemoteBackend
from modelport.gateway.backends.remote.signature_negotiation import RemoteClient
from modelport.gateway.backends.remote.torchserve_grpc import TorchServeGrpcClient
from modelport.gateway.backends.remote.torchserve_http import TorchServeHttpClient
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes_file import ModelRoute, UpstreamProtocol


def load(artifact: Artifact) -> RemoteBackend:
    """Describe the model on the server and negotiate its signature (blocking).

    Raises:
        Unavailable: no endpoint can be reached, or none has a worker for this version.
        InvalidArgument: the archive contradicts the configuration.
        Unsupported: torch does not have the datatype of an input or output.
    """

    def connect(route: ModelRoute, model: str) -> RemoteClient:
        return _server(route, model, artifact.config)

    return backend.load(artifact, connect)


async def versions(route: ModelRoute, model_name: str) -> RemoteVersions:
    """The versions that have a worker, ascending; 1 without a management API.

    Raises:
        Unavailable: no endpoint can be reached.
        NotFound: the endpoints have no such model.
    """
    return await backend.versions(route, model_name, _connect)


def _connect(route: ModelRoute, model: str) -> RemoteClient:
    return _server(route, model, None)


def _server(route: ModelRoute, model: str, config: ModelConfig | None) -> RemoteClient:
    kind = TorchServeGrpcClient if route.protocol is UpstreamProtocol.GRPC else TorchServeHttpClient
    return kind(route, model, config)
