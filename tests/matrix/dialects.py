"""The ways to ask the gateway: one function for each dialect, with clients that know none of it."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from modelport.gateway.types import NUMPY_DTYPES, Array, ModelSignature, Tensor, TensorSpec
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import serving_pb2, torchserve_inference_pb2
from tests.torchserve.clients import as_tensors, document

TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Refused(Exception):
    """An error as the client sees it: an HTTP status or the name of a gRPC one, and the text."""

    status: str
    text: str


@dataclass(frozen=True)
class Asked:
    """One request. ``inputs`` are in the wire's shapes; outputs are answered as they come."""

    model: str
    signature: ModelSignature
    inputs: Mapping[str, Array]


Ask = Callable[[Asked], dict[str, Array]]


@dataclass(frozen=True)
class DialectColumn:
    """A column. ``unknown`` and ``invalid``: the statuses of an unknown model and a bad request."""

    ask: Ask
    unknown: str
    invalid: str


@contextlib.contextmanager
def dialects(http: str, grpc_address: str) -> Iterator[dict[str, DialectColumn]]:
    """Every dialect against the gateway at these two ``host:port``."""
    with contextlib.ExitStack() as stack:
        triton_http = stack.enter_context(
            contextlib.closing(tritonclient.http.InferenceServerClient(http))
        )
        triton_grpc = stack.enter_context(
            contextlib.closing(tritonclient.grpc.InferenceServerClient(grpc_address))
        )
        channel = stack.enter_context(grpc.insecure_channel(grpc_address))
        yield {
            "OIP JSON": DialectColumn(_oip(triton_http, tritonclient.http, False), "404", "400"),
            "OIP binary": DialectColumn(_oip(triton_http, tritonclient.http, True), "404", "400"),
            "OIP gRPC": DialectColumn(
                _oip(triton_grpc, tritonclient.grpc), "NOT_FOUND", "INVALID_ARGUMENT"
            ),
            "TFS REST rows": DialectColumn(_rows(http), "404", "400"),
            "TFS REST columns": DialectColumn(_columns(http), "404", "400"),
            "TFS gRPC": DialectColumn(_predict(channel), "NOT_FOUND", "INVALID_ARGUMENT"),
            "TorchServe REST": DialectColumn(_predictions(http), "404", "400"),
            # TorchServe itself answers INTERNAL where it does not know a model.
            "TorchServe gRPC": DialectColumn(
                _predictions_grpc(channel), "INTERNAL", "INVALID_ARGUMENT"
            ),
            "SageMaker": DialectColumn(_invocations(http), "404", "400"),
        }


def _post(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[Mapping[str, str], bytes]:
    request = urllib.request.Request(url, body, dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(str(error.code), error.read().decode(errors="replace")) from None


# -- Open Inference Protocol --------------------------------------------------------------------


def _oip(client: Any, module: Any, binary: bool | None = None) -> Ask:
    form = {} if binary is None else {"binary_data": binary}

    def ask(asked: Asked) -> dict[str, Array]:
        tensors = []
        for name, array in asked.inputs.items():
            tensors.append(module.InferInput(name, list(array.shape), _word(array)))
            tensors[-1].set_data_from_numpy(array, **form)
        names = [spec.name for spec in asked.signature.outputs]
        wanted = [module.InferRequestedOutput(name, **form) for name in names]
        try:
            result = client.infer(asked.model, tensors, outputs=wanted)
        except InferenceServerException as error:
            status = (error.status() or "").rpartition(".")[2]
            raise Refused(status, error.message()) from error
        return {name: result.as_numpy(name) for name in names}

    return ask


def _word(array: Array) -> str:
    return next(word.value for word, dtype in NUMPY_DTYPES.items() if dtype == array.dtype)


def _binary_body(inputs: Mapping[str, Array]) -> tuple[bytes, int]:
    body, length = tritonclient.http.InferenceServerClient.generate_request_body(as_tensors(inputs))
    return bytes(body), length


def _oip_answer(body: bytes, header_length: int | None) -> dict[str, Array]:
    result = tritonclient.http.InferenceServerClient.parse_response_body(
        body, header_length=header_length
    )
    names = [output["name"] for output in result.get_response()["outputs"]]
    return {name: result.as_numpy(name) for name in names}


# -- TensorFlow Serving -------------------------------------------------------------------------


def _model_shape(spec: TensorSpec, array: Array) -> Array:
    """In the shape that the model itself takes, which is what TensorFlow Serving's clients send."""
    return array if spec.reshape is None else array.reshape(len(array), *spec.reshape)


def _from_json(asked: Asked, found: Any, by_row: bool) -> dict[str, Array]:
    """``predictions`` or ``outputs`` as arrays; a single output comes without its name."""
    specs = asked.signature.outputs
    if len(specs) == 1:
        found = {specs[0].name: found}
    elif by_row:
        found = {spec.name: [row[spec.name] for row in found] for spec in specs}
    return {s.name: np.array(found[s.name], NUMPY_DTYPES[s.datatype]) for s in specs}


def _rows(http: str) -> Ask:
    def ask(asked: Asked) -> dict[str, Array]:
        specs = asked.signature.inputs
        arrays = {s.name: _model_shape(s, asked.inputs[s.name]).tolist() for s in specs}
        instances = [
            dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)
        ]
        if len(specs) == 1:
            instances = arrays[specs[0].name]
        _, body = _post(
            f"http://{http}/v1/models/{asked.model}:predict",
            json.dumps({"instances": instances}).encode(),
            {"Content-Type": "application/json"},
        )
        return _from_json(asked, json.loads(body)["predictions"], by_row=True)

    return ask


def _columns(http: str) -> Ask:
    def ask(asked: Asked) -> dict[str, Array]:
        specs = asked.signature.inputs
        inputs = {s.name: _model_shape(s, asked.inputs[s.name]).tolist() for s in specs}
        _, body = _post(
            f"http://{http}/v1/models/{asked.model}:predict",
            json.dumps({"inputs": inputs}).encode(),
            {"Content-Type": "application/json"},
        )
        return _from_json(asked, json.loads(body)["outputs"], by_row=False)

    return ask


def _predict(channel: grpc.Channel) -> Ask:
    call = channel.unary_unary(
        "/tensorflow.serving.PredictionService/Predict",
        request_serializer=serving_pb2.PredictRequest.SerializeToString,
        response_deserializer=serving_pb2.PredictResponse.FromString,
    )

    def ask(asked: Asked) -> dict[str, Array]:
        request = serving_pb2.PredictRequest()
        request.model_spec.name = asked.model
        for spec in asked.signature.inputs:
            array = _model_shape(spec, asked.inputs[spec.name])
            tensor = Tensor(spec.name, spec.datatype, array)
            tensor_proto.encode(tensor, request.inputs[spec.name])
        try:
            reply = call(request, timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise _refused(error) from error
        return {
            name: tensor_proto.decode(name, message).data for name, message in reply.outputs.items()
        }

    return ask


def _refused(error: Any) -> Refused:
    return Refused(error.code().name, error.details())


# -- TorchServe and SageMaker -------------------------------------------------------------------


def _predictions(http: str) -> Ask:
    def ask(asked: Asked) -> dict[str, Array]:
        body, length = _binary_body(asked.inputs)
        headers, answer = _post(
            f"http://{http}/predictions/{asked.model}",
            body,
            {
                "Content-Type": "application/octet-stream",
                "Inference-Header-Content-Length": str(length),
            },
        )
        size = headers.get("Inference-Header-Content-Length")
        return _oip_answer(answer, None if size is None else int(size))

    return ask


def _predictions_grpc(channel: grpc.Channel) -> Ask:
    call = channel.unary_unary(
        "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
        request_serializer=torchserve_inference_pb2.PredictionsRequest.SerializeToString,
        response_deserializer=torchserve_inference_pb2.PredictionResponse.FromString,
    )

    def ask(asked: Asked) -> dict[str, Array]:
        body, _ = _binary_body(asked.inputs)
        request = torchserve_inference_pb2.PredictionsRequest(
            model_name=asked.model, input={"body": body}
        )
        try:
            answer = call(request, timeout=TIMEOUT_SECONDS).prediction
        except grpc.RpcError as error:
            raise _refused(error) from error
        _, size = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
        return _oip_answer(answer, size)

    return ask


def _invocations(http: str) -> Ask:
    def ask(asked: Asked) -> dict[str, Array]:
        _, answer = _post(
            f"http://{http}/invocations",
            json.dumps(document(asked.inputs)).encode(),
            {
                "Content-Type": "application/json",
                "X-Amzn-SageMaker-Target-Model": asked.model,
            },
        )
        return _oip_answer(answer, None)

    return ask
