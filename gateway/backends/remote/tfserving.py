"""A model on TensorFlow Serving, or any server with its PredictionService or REST API.

Inputs and outputs are those of one signature, by default ``serving_default``; the parameter
``TF_SIGNATURE_DEF`` (Triton's, for SavedModels) names another. Tensors have the model's shapes. A
route's ``version`` or ``label`` selects the remote version; without them it is the version
requested here.
"""

from __future__ import annotations

from modelport.gateway.backends.remote.backend import RemoteServer
from modelport.gateway.backends.remote.tfserving_grpc import TfServingGrpcClient
from modelport.gateway.backends.remote.tfserving_http import TfServingHttpClient

_SERVER = RemoteServer(TfServingGrpcClient, TfServingHttpClient)
load, versions = _SERVER.load, _SERVER.versions
