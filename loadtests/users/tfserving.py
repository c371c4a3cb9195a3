"""TensorFlow Serving's protocols: REST in columns, and ``PredictionService.Predict``.

Requests have the model's own shapes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from modelport.loadtests.load.payloads import DTYPES, Array, BadPayload, Payloads, Tensors
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.users import oip
from modelport.loadtests.users.answer_checker import ONLY
from modelport.loadtests.users.grpc_client import GrpcClient
from modelport.loadtests.users.http import HttpClient, request, segment
from modelport.loadtests.users.proto.messages_pb2 import PredictRequest, PredictResponse
from modelport.loadtests.users.protocol_table import Dialect

PREDICT = "/tensorflow.serving.PredictionService/Predict"
#: TensorFlow's number of each datatype (tensorflow/core/framework/types.proto).
NUMBERS: Mapping[str, int] = {
    "FP32": 1,
    "FP64": 2,
    "INT32": 3,
    "UINT8": 4,
    "INT16": 5,
    "INT8": 6,
    "BYTES": 7,
    "INT64": 9,
    "BOOL": 10,
    "UINT16": 17,
    "FP16": 19,
    "UINT32": 22,
    "UINT64": 23,
}
WORDS = {number: word for word, number in NUMBERS.items()}
#: Fields of typed values by datatype; all others are in ``int_val``.
FIELDS = {
    "FP32": "float_val",
    "FP64": "double_val",
    "BYTES": "string_val",
    "INT64": "int64_val",
    "BOOL": "bool_val",
    "FP16": "half_val",
    "UINT32": "uint32_val",
    "UINT64": "uint64_val",
}


def _shaped(payloads: Payloads, number: int) -> dict[str, Array]:
    """The inputs in the model's own shapes."""
    return {
        name: array.reshape(array.shape[0], *payloads.reshape[name])
        if name in payloads.reshape
        else array
        for name, array in payloads.requests[number].items()
    }


def values(array: Array) -> Any:
    """Nested lists, for JSON."""
    if array.dtype.kind != "O":
        return array.tolist()
    coded = [{"b64": base64.b64encode(value).decode()} for value in array.ravel().tolist()]
    return np.array(coded, np.object_).reshape(array.shape).tolist()


def path(target: LoadTestTarget) -> str:
    version = f"/versions/{segment(target.version)}" if target.version else ""
    return f"/v1/models/{segment(target.model)}{version}:predict"


def _rest(target: LoadTestTarget, payloads: Payloads, number: int) -> bytes:
    inputs = {name: values(array) for name, array in _shaped(payloads, number).items()}
    columns = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    body = json.dumps({"inputs": columns}, separators=(",", ":")).encode()
    return request(target, path(target), body, {"content-type": "application/json"})


def read_rest(body: bytes, json_size: int | None) -> Tensors:
    """The outputs; a single one has no name, and becomes ``ONLY``."""
    outputs = json.loads(body)["outputs"]
    if not isinstance(outputs, dict):
        return {ONLY: _decoded(outputs)}
    return {name: _decoded(values) for name, values in outputs.items()}


def _decoded(values: Any) -> Array:
    array = np.array(values)
    if array.dtype.kind == "O":  # {"b64": ...}
        array = np.array([base64.b64decode(v["b64"]) for v in array.ravel()], np.object_)
    elif array.dtype.kind == "U":
        array = np.array([v.encode() for v in array.ravel().tolist()], np.object_)
    return array


def _message(target: LoadTestTarget, payloads: Payloads, number: int) -> bytes:
    made = PredictRequest()
    made.model_spec.name = target.model
    if target.version:
        if not target.version.isdigit():
            raise BadPayload(
                f"version '{target.version}' is not a number, as this protocol requires"
            )
        made.model_spec.version.value = int(target.version)
    for name, array in _shaped(payloads, number).items():
        tensor = made.inputs[name]
        tensor.dtype = NUMBERS[payloads.datatypes[name]]
        for size in array.shape:
            tensor.tensor_shape.dim.add(size=size)
        if array.dtype.kind == "O":
            tensor.string_val.extend(array.ravel().tolist())
        else:
            tensor.tensor_content = oip.raw(array)
    return bytes(made.SerializeToString())


def _read_message(body: bytes, json_size: int | None) -> Tensors:
    answer = PredictResponse.FromString(body)
    return {name: _tensor(tensor) for name, tensor in answer.outputs.items()}


def _tensor(tensor: Any) -> Array:
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    word = WORDS[tensor.dtype]
    if tensor.tensor_content:
        return oip.from_raw(tensor.tensor_content, word, shape)
    values = list(getattr(tensor, FIELDS.get(word, "int_val")))
    if word == "FP16":
        flat: Array = np.array(values, "<u2").view("<f2")
    else:
        flat = np.array(values, np.object_ if word == "BYTES" else DTYPES[word])
    count = int(np.prod(shape, dtype=np.int64))
    if flat.size == 1 and count > 1:  # a single value is repeated
        flat = np.repeat(flat, count)
    return flat.reshape(shape)


REST = Dialect(_rest, HttpClient, read_rest)
GRPC = Dialect(_message, partial(GrpcClient, PREDICT), _read_message)
