"""The Open Inference Protocol over gRPC."""

from __future__ import annotations

from functools import partial

from modelport.loadtests.users import oip
from modelport.loadtests.users.grpc_client import GrpcClient
from modelport.loadtests.users.protocol_table import Dialect

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
DIALECT = Dialect(oip.message, partial(GrpcClient, MODEL_INFER), oip.read_message)
