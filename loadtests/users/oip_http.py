"""The Open Inference Protocol over HTTP: JSON, also over HTTP/2, and Triton's binary tensors."""

from __future__ import annotations

from modelport.loadtests.load.payloads import Payloads
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.users import oip
from modelport.loadtests.users.http import BINARY_SIZE, HttpClient, request, segment
from modelport.loadtests.users.http2_client import JsonOverHttp2
from modelport.loadtests.users.protocol_table import Dialect


def path(target: LoadTestTarget) -> str:
    version = f"/versions/{segment(target.version)}" if target.version else ""
    return f"/v2/models/{segment(target.model)}{version}/infer"


def _json(target: LoadTestTarget, payloads: Payloads, number: int) -> bytes:
    body = oip.json_body(payloads, number)
    return request(target, path(target), body, {"content-type": "application/json"})


def _binary(target: LoadTestTarget, payloads: Payloads, number: int) -> bytes:
    body, size = oip.binary_body(payloads, number)
    headers = {"content-type": "application/octet-stream", BINARY_SIZE: str(size)}
    return request(target, path(target), body, headers)


def _body(target: LoadTestTarget, payloads: Payloads, number: int) -> bytes:
    return oip.json_body(payloads, number)


def _over_http2(target: LoadTestTarget, timeout_seconds: float) -> JsonOverHttp2:
    return JsonOverHttp2(path(target), target, timeout_seconds)


JSON = Dialect(_json, HttpClient, oip.read_http)
JSON_HTTP2 = Dialect(_body, _over_http2, oip.read_http)
BINARY = Dialect(_binary, HttpClient, oip.read_http)
