"""A model that TensorFlow Serving runs, or any server that speaks its PredictionService or REST.

Inputs and outputs are those of one signature, ``serving_default`` unless the parameter
``TF_SIGNATURE_DEF`` (Triton's own, for SavedModels) names another. Tensors are sent in the shapes
of the model. A route's ``version`` or ``label`` decides what is asked; without them the version
that is asked for here.
"""

from __future__ import annotations

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.remote import backend
from modelport.gateway.backends.remote.backend import RemoteBackend
from modelport.gateway.backends.remote.negotiation import RemoteClient
from modelport.gateway.backends.remote.tfserving_grpc import TfServingGrpcClient
from modelport.gateway.backends.remote.tfserving_http import TfServingHttpClient
from modelport.gateway.backends.remote.tfserving_model import DEFAULT_SIGNATURE, ServableTarget
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import autocomplete
from modelport.gateway.repository.routes import ModelRoute, UpstreamProtocol
from modelport.gateway.repository.scan import VERSION_NAME


def load(artifact: Artifact) -> RemoteBackend:
    """Find out what the server has, and agree with it (blocking).

    Raises:
        Unavailable: no endpoint can be reached, or none has this version AVAILABLE.
        InvalidArgument: the route's version is no number; the model lacks the signature; or that
            and the configuration contradict each other.
        Unsupported: an input or output is no tensor of ours, or does not travel over REST.
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


async def versions(route: ModelRoute, model_name: str) -> list[int]:
    """The versions that any endpoint has AVAILABLE, ascending: all, or the route's.

    Raises:
        Unavailable: no endpoint can be reached.
        NotFound: they have no such model.
    """
    return await backend.versions(route, model_name, _connect)


def _connect(route: ModelRoute, model: str) -> RemoteClient:
    return _server(route, ServableTarget(model, label=route.label))


def _server(route: ModelRoute, target: ServableTarget) -> RemoteClient:
    if route.version and not VERSION_NAME.match(route.version):
        raise InvalidArgument(
            f"the route's version of '{target.model}' must be a number, not '{route.version}': "
            "TensorFlow Serving has no others"
        )
    return (
        TfServingGrpcClient if route.protocol is UpstreamProtocol.GRPC else TfServingHttpClient
    )(route, target)
