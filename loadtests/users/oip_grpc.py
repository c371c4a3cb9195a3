"""The Open Inference Protocol over gRPC."""

from __future__ import annotations

from modelport.loadtests.users import oip
from modelport.loadtests.users.grpc_client import GrpcClient
from modelport.loadtests.users.protocol_table import Dialect


class ModelInfer(GrpcClient):
    """The method ``ModelInfer``."""

    method = "/inference.GRPCInferenceService/ModelInfer"


DIALECT = Dialect(oip.message, ModelInfer, oip.read_message)
