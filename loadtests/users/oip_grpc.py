"""The Open Inference Protocol over gRPC."""

from __future__ import annotations

from loadtests.users import oip
from loadtests.users.dialects import Dialect
from loadtests.users.grpc_client import GrpcClient


class ModelInfer(GrpcClient):
    method = "/inference.GRPCInferenceService/ModelInfer"


DIALECT = Dialect(oip.message, ModelInfer, oip.read_message)
