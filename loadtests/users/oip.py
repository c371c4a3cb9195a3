"""Bodies of the Open Inference Protocol: JSON, Triton's binary extension, gRPC messages."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from modelport.loadtests.load.payloads import DTYPES, Array, BadPayload, Payloads, Tensors
from modelport.loadtests.load.target import LoadTestTarget


def plain(array: Array) -> list[Any]:
    """Flat values for JSON."""
    if array.dtype.kind == "O":
        return [value.decode() for value in array.ravel().tolist()]
    return array.ravel().tolist()


def raw(array: Array) -> bytes:
    """The bytes of a tensor, little endian; BYTES with their lengths."""
    if array.dtype.kind == "O":
        return bytes(serialize_byte_tensor(array).item())
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def from_raw(data: bytes, datatype: str, shape: list[int]) -> Array:
    if datatype == "BYTES":
        return np.asarray(deserialize_bytes_tensor(data)).reshape(shape)
    if datatype == "BF16":
        bits = np.frombuffer(data, "<u2").astype("<u4") << 16
        return bits.view("<f4").reshape(shape)
    return np.frombuffer(data, DTYPES[datatype]).reshape(shape)


def json_body(payloads: Payloads, number: int) -> bytes:
    inputs = []
    for name, array in payloads.requests[number].items():
        datatype = payloads.datatypes[name]
        if datatype in ("FP16", "BF16"):
            raise BadPayload(
                f"input '{name}' is {datatype}, which JSON does not support; use a binary protocol"
            )
        inputs.append(
            {"name": name, "shape": array.shape, "datatype": datatype, "data": plain(array)}
        )
    return json.dumps({"inputs": inputs}, separators=(",", ":")).encode()


def binary_body(payloads: Payloads, number: int) -> tuple[bytes, int]:
    """The body and the size of its JSON part; the answer is requested in binary too."""
    inputs, parts = [], []
    for name, array in payloads.requests[number].items():
        parts.append(raw(array))
        inputs.append(
            {"name": name, "shape": array.shape, "datatype": payloads.datatypes[name]}
            | {"parameters": {"binary_data_size": len(parts[-1])}}
        )
    document = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    head = json.dumps(document, separators=(",", ":")).encode()
    return head + b"".join(parts), len(head)


def read_http(body: bytes, json_size: int | None) -> Tensors:
    """The outputs of an answer, JSON or binary."""
    size = len(body) if json_size is None else json_size
    found: dict[str, Array] = {}
    position = size
    for output in json.loads(body[:size])["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], output["shape"]
        length = (output.get("parameters") or {}).get("binary_data_size")
        if length is not None:
            found[name] = from_raw(body[position : position + length], datatype, shape)
            position += length
        elif datatype == "BYTES":
            values = [v.encode() if isinstance(v, str) else v for v in np.ravel(output["data"])]
            found[name] = np.array(values, np.object_).reshape(shape)
        else:
            found[name] = np.array(output["data"], DTYPES[datatype]).reshape(shape)
    return found


def message(target: LoadTestTarget, payloads: Payloads, number: int) -> bytes:
    """A ``ModelInferRequest``."""
    request = service_pb2.ModelInferRequest(model_name=target.model, model_version=target.version)
    for name, array in payloads.requests[number].items():
        datatype = payloads.datatypes[name]
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(raw(array))
    return bytes(request.SerializeToString())


#: Fields of typed contents by datatype.
CONTENTS = {
    "BOOL": "bool_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "BYTES": "bytes_contents",
}


def read_message(body: bytes, json_size: int | None) -> Tensors:
    """The outputs of a ``ModelInferResponse``, raw or typed."""
    response = service_pb2.ModelInferResponse.FromString(body)
    found: dict[str, Array] = {}
    for number, output in enumerate(response.outputs):
        shape = list(output.shape)
        if response.raw_output_contents:
            data = response.raw_output_contents[number]
            found[output.name] = from_raw(data, output.datatype, shape)
            continue
        small = "uint_contents" if output.datatype.startswith("UINT") else "int_contents"
        values = getattr(output.contents, CONTENTS.get(output.datatype, small))
        found[output.name] = np.array(list(values), DTYPES[output.datatype]).reshape(shape)
    return found
