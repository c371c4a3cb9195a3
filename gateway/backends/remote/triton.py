"""A model on another Open Inference Protocol server: Triton, KServe, MLServer or modelport.

Tensors are sent as raw bytes wherever the server accepts them, so every bit is preserved.
"""

from __future__ import annotations

from modelport.gateway.backends.remote.backend import RemoteServer
from modelport.gateway.backends.remote.triton_grpc import TritonGrpcClient
from modelport.gateway.backends.remote.triton_http import TritonHttpClient

_SERVER = RemoteServer(TritonGrpcClient, TritonHttpClient)
load, versions = _SERVER.load, _SERVER.versions
