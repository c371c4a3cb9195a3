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

from modelport.gateway.backends.remote.backend import RemoteServer
from modelport.gateway.backends.remote.torchserve_grpc import TorchServeGrpcClient
from modelport.gateway.backends.remote.torchserve_http import TorchServeHttpClient

_SERVER = RemoteServer(TorchServeGrpcClient, TorchServeHttpClient)
load, versions = _SERVER.load, _SERVER.versions
