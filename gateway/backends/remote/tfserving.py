"""A model on TensorFlow Serving, or any server with its PredictionService or REST API.

Inputs and outputs are those of one signature, by default ``serving_default``; the parameter
``TF_SIGNATURE_DEF`` (Triton's, for SavedModels) names another. Tensors have the model's shapes. A
route's ``version`` or ``label`` selects the remote version; without them it is the version
requested here.
"""

from __future__ import annotations

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.registry import RemoteVersions
from modelport.gateway.backends.remote import backend
from modelport.gateway.backends.remote.backend import RemoteBackend
from modelport.gateway.backends.remote.signature_negotiation import RemoteClient
from modelport.gateway.backends.remote.tfserving_grpc import TfServingGrpcClient
from modelport.gateway.backends.remote.tfserving_http import TfServingHttpClient
from modelport.gateway.backends.remote.tfserving_model import DEFAULT_SIGNATURE, ServableTarget
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import autocomplete
from modelport.gateway.repository.routes_file import ModelRoute, UpstreamProtocol
from modelport.gateway.repository.scan import VERSION_NAME


def load(artifact: Artifact) -> RemoteBackend:
    """Describe the model on the server and negotiate its signature (blocking).

    Raises:
        Unavailable: no endpoint can be reached, or none has this version AVAILABLE.
        InvalidArgument: the route's version is not a number; the model lacks the signature; or the
            signature contradicts the configuration.
        Unsupported: an input or output has an unsupported type, or REST does not carry it.
    """
    config = artifact.config
    signature = parameters.text(config, "TF_SIGNATURE_DEF", DEFAULT_SIGNATURE)
    inputs, outputs = autocomplete.declared(config)
    declared = bool(inputs or outputs or config.max_batch_size)

    def connect(route: ModelRoute, model: str) -> RemoteClient:
        return _server(
            route, ServableTarget(model, signature, route.label, inputs, outputs, declared)
        )

    return backend.load(artifact, connect)


async def versions(route: ModelRoute, model_name: str) -> RemoteVersions:
    """The AVAILABLE versions on any endpoint, ascending: all, or the route's.

    Raises:
        Unavailable: no endpoint can be reached.
        NotFound: the endpoints have no such model.
    """
    return await backend.versions(route, model_name, _connect)


def _connect(route: ModelRoute, model: str) -> RemoteClient:
    return _server(route, ServableTarget(model, label=route.label))


def _server(route: ModelRoute, target: ServableTarget) -> RemoteClient:
    if route.version and not VERSION_NAME.match(route.version):
        raise InvalidArgument(
            f"the route's version of '{target.model}' must be a number, not '{route.version}': "
            "TensorFlow Serving has only numbers"
        )
    return (
        TfServingGrpcClient if route.protocol is UpstreamProtocol.GRPC else TfServingHttpClient
    )(route, target)
