"""The ways to ask TorchServe with named tensors."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import tritonclient.http

from modelport.gateway.types import NUMPY_DTYPES, Array
from modelport.loadtests.system.processes import HOST
from tests.torchserve.server import TorchServePorts

#: A status with outputs by name, or with the error's text.
Answer = tuple[int, Mapping[str, Array] | str]
Ask = Callable[[str, Mapping[str, Array]], Answer]


def document(inputs: Mapping[str, Array], **more: Any) -> dict[str, Any]:
    words = {"int64": "INT64", "float32": "FP32"}
    tensors = [
        {"name": name, "datatype": words[x.dtype.name], "shape": list(x.shape), "data": x.tolist()}
        for name, x in inputs.items()
    ]
    return {"inputs": tensors, **more}


def post(
    ports: TorchServePorts, path: str, body: bytes, headers: Mapping[str, str]
) -> tuple[int, Mapping[str, str], bytes]:
    request = urllib.request.Request(f"http://{HOST}:{ports.inference}{path}", body, dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def read(status: int, headers: Mapping[str, str], body: bytes) -> Answer:
    if status != 200:
        return status, json.loads(body).get("error", body.decode(errors="replace"))
    length = headers.get("Inference-Header-Content-Length")
    size = None if length is None else int(length)
    result = tritonclient.http.InferenceServerClient.parse_response_body(body, header_length=size)
    names = [output["name"] for output in result.get_response()["outputs"]]
    return status, {name: result.as_numpy(name) for name in names}


def callers(ports: TorchServePorts, channel: grpc.Channel) -> dict[str, Ask]:
    """The ways to ask: each gives a status, and outputs by name or the error's text."""

    def as_json(model: str, inputs: Mapping[str, Array]) -> Answer:
        body = json.dumps(document(inputs)).encode()
        headers = {"Content-Type": "application/json"}
        return read(*post(ports, f"/predictions/{model}", body, headers))

    def as_binary(model: str, inputs: Mapping[str, Array]) -> Answer:
        client = tritonclient.http.InferenceServerClient
        body, length = client.generate_request_body(as_tensors(inputs))
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(length),
        }
        return read(*post(ports, f"/predictions/{model}", body, headers))

    def with_tritonclient(model: str, inputs: Mapping[str, Array]) -> Answer:
        url = f"{HOST}:{ports.inference}"
        with contextlib.closing(tritonclient.http.InferenceServerClient(url)) as client:
            result = client.infer(model, as_tensors(inputs))
        names = [output["name"] for output in result.get_response()["outputs"]]
        return 200, {name: result.as_numpy(name) for name in names}

    def over_grpc(model: str, inputs: Mapping[str, Array]) -> Answer:
        client = tritonclient.http.InferenceServerClient
        body, _ = client.generate_request_body(as_tensors(inputs))
        answer = predict(channel, model, bytes(body))
        _, size = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
        return read(200, {"Inference-Header-Content-Length": str(size)}, answer)

    return {
        "HTTP JSON": as_json,
        "HTTP binary": as_binary,
        "tritonclient": with_tritonclient,
        "gRPC binary": over_grpc,
    }


def as_tensors(inputs: Mapping[str, Array]) -> list[Any]:
    tensors = []
    for name, array in inputs.items():
        datatype = next(word for word, dtype in NUMPY_DTYPES.items() if dtype == array.dtype)
        tensors.append(tritonclient.http.InferInput(name, array.shape, datatype.value))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def predict(channel: grpc.Channel, model: str, body: bytes) -> bytes:
    """``Predictions`` of TorchServe's ``inference.proto``, its two messages written by hand."""
    call = channel.unary_unary("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions")
    entry = _field(1, b"body") + _field(2, body)
    reply: bytes = call(_field(1, model.encode()) + _field(3, entry), timeout=120)
    size, end = 0, 1
    while True:
        size |= (reply[end] & 0x7F) << (7 * (end - 1))
        end += 1
        if reply[end - 1] < 0x80:
            return reply[end : end + size]


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    length, size = bytearray(), len(content)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content
