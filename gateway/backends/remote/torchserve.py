"""A model that TorchServe runs: archives of ``modelport package --for torchserve``, and others.

Our archives take and give the body of the Open Inference Protocol, tensors as raw bytes. Their
signature comes from ``config.pbtxt`` (the repository's, or the route's ``config``), else from the
archive itself where the route names TorchServe's ``management`` API. A model of which nobody tells
anything has one BYTES input ``data`` of shape [1], the body of a prediction, and one BYTES output
``output``, the answer as it is.

TorchServe names versions as it likes; ``1.0`` and the like are the number 1 here. Without the
management API it does not tell them: then there is version 1, and its default version is asked.
"""

from __future__ import annotations

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.remote import backend
from modelport.gateway.backends.remote.backend import RemoteBackend
from modelport.gateway.backends.remote.negotiation import RemoteClient
from modelport.gateway.backends.remote.torchserve_grpc import TorchServeGrpcClient
from modelport.gateway.backends.remote.torchserve_http import TorchServeHttpClient
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes import ModelRoute, UpstreamProtocol


def load(artifact: Artifact) -> RemoteBackend:
    """Find out what the server has, and agree with it (blocking).

    Raises:
        Unavailable: no endpoint can be reached, or none has a worker for this version.
        InvalidArgument: archive and configuration contradict each other.
        Unsupported: an input or output is of a datatype that torch does not have.
    """

    def connect(route: ModelRoute, model: str) -> RemoteClient:
        return _server(route, model, artifact.config)

    return backend.load(artifact, connect)


async def versions(route: ModelRoute, model_name: str) -> list[int]:
    """The versions that have a worker, ascending; 1 where the management API is not named.

    Raises:
        Unavailable: no endpoint can be reached.
        NotFound: they have no such model.
    """
    return await backend.versions(route, model_name, _connect)


def _connect(route: ModelRoute, model: str) -> RemoteClient:
    return _server(route, model, None)


def _server(route: ModelRoute, model: str, config: ModelConfig | None) -> RemoteClient:
    kind = TorchServeGrpcClient if route.protocol is UpstreamProtocol.GRPC else TorchServeHttpClient
    return kind(route, model, config)
