"""TorchServe's protocols, with the bodies of modelport's archives: named tensors."""

from __future__ import annotations

import json
from functools import partial

from modelport.loadtests.load.payloads import Payloads, Tensors
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.users import oip
from modelport.loadtests.users.grpc_client import GrpcClient
from modelport.loadtests.users.http import BINARY_SIZE, HttpClient, request, segment
from modelport.loadtests.users.proto.messages_pb2 import PredictionResponse, PredictionsRequest
from modelport.loadtests.users.protocol_table import Dialect

PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
#: The field of a gRPC request with the body.
BODY = "body"


def path(target: LoadTestTarget) -> str:
    version = f"/{segment(target.version)}" if target.version else ""
    return f"/predictions/{segment(target.model)}{version}"


def _rest(target: LoadTestTarget, payloads: Payloads, number: int) -> bytes:
    body, size = oip.binary_body(payloads, number)
    headers = {"content-type": "application/octet-stream", BINARY_SIZE: str(size)}
    return request(target, path(target), body, headers)


def _message(target: LoadTestTarget, payloads: Payloads, number: int) -> bytes:
    body, _ = oip.binary_body(payloads, number)
    made = PredictionsRequest(
        model_name=target.model, model_version=target.version, input={BODY: body}
    )
    return bytes(made.SerializeToString())


def _read_message(body: bytes, json_size: int | None) -> Tensors:
    """The outputs; the size of the JSON part is not sent, so it ends where its object ends."""
    answer = PredictionResponse.FromString(body).prediction
    _, size = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
    return oip.read_http(answer, size)


REST = Dialect(_rest, HttpClient, oip.read_http)
GRPC = Dialect(_message, partial(GrpcClient, PREDICTIONS), _read_message)
