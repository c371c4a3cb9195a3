"""HTTP request and response formats of the compared servers.

A server's entry names one function for each encoding. The check before every measurement and the
load itself send the same bytes.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.peers.model import PeerModel

JSON = {"content-type": "application/json"}
BINARY = {"content-type": "application/octet-stream"}
BINARY_SIZE = "inference-header-content-length"
#: numpy's datatypes by OIP's names.
DTYPES: Mapping[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "INT64": np.dtype("<i8")}

Tensors = dict[str, np.ndarray]
Read = Callable[[bytes, Mapping[str, str]], Tensors]


@dataclass(frozen=True)
class HttpExchange:
    """One request; ``read`` converts the answer's body and (lower-case) headers to tensors."""

    path: str
    body: bytes = field(repr=False)
    headers: Mapping[str, str]
    read: Read


Encode = Callable[[PeerModel], HttpExchange]


def oip_json(model: PeerModel) -> HttpExchange:
    """The Open Inference Protocol with tensors as numbers."""
    inputs = [
        {"name": name, "shape": tensor.shape, "datatype": model.datatypes[name]}
        | {"data": tensor.ravel().tolist()}
        for name, tensor in model.tensors.items()
    ]
    body = json.dumps({"inputs": inputs}).encode()
    return HttpExchange(f"/v2/models/{model.name}/infer", body, JSON, _read_oip)


def oip_binary(model: PeerModel) -> HttpExchange:
    """The Open Inference Protocol with Triton's binary tensor extension, in both directions."""
    parts = [
        np.ascontiguousarray(t, DTYPES[model.datatypes[n]]).tobytes()
        for n, t in model.tensors.items()
    ]
    inputs = [
        {"name": name, "shape": tensor.shape, "datatype": model.datatypes[name]}
        | {"parameters": {"binary_data_size": len(part)}}
        for (name, tensor), part in zip(model.tensors.items(), parts, strict=True)
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {**BINARY, BINARY_SIZE: str(len(head))}
    body = head + b"".join(parts)
    return HttpExchange(f"/v2/models/{model.name}/infer", body, headers, _read_oip)


def _read_oip(body: bytes, headers: Mapping[str, str]) -> Tensors:
    size = int(headers.get(BINARY_SIZE, len(body)))
    found, position = {}, size
    for output in json.loads(body[:size])["outputs"]:
        dtype, length = DTYPES[output["datatype"]], output.get("parameters") or {}
        if "binary_data_size" in length:
            end = position + length["binary_data_size"]
            tensor = np.frombuffer(body[position:end], dtype)
            position = end
        else:
            tensor = np.array(output["data"], dtype)
        found[output["name"]] = tensor.reshape(output["shape"])
    return found


def plain_json(path: str) -> Encode:
    """`{"x": [[1, 2]]}` and a similar answer, for servers without a protocol."""

    def encode(model: PeerModel) -> HttpExchange:
        body = json.dumps({name: tensor.tolist() for name, tensor in model.tensors.items()})
        return HttpExchange(path, body.encode(), JSON, _read_plain)

    return encode


def _read_plain(body: bytes, headers: Mapping[str, str]) -> Tensors:
    return {name: np.array(values) for name, values in json.loads(body).items()}


def npy(path: str) -> Encode:
    """The only input as a `.npy` file; the outputs as `.npz`, or as plain JSON."""

    def encode(model: PeerModel) -> HttpExchange:
        (tensor,) = model.tensors.values()
        file = io.BytesIO()
        np.save(file, tensor)
        return HttpExchange(path, file.getvalue(), BINARY, _read_npz)

    return encode


def _read_npz(body: bytes, headers: Mapping[str, str]) -> Tensors:
    if body.startswith(b"{"):
        return _read_plain(body, headers)
    with np.load(io.BytesIO(body)) as arrays:
        return dict(arrays)


GRPC_FRAME = struct.Struct(">BI")  # not compressed, length


def oip_grpc(model: PeerModel) -> bytes:
    """A framed ModelInferRequest with raw contents, as an HTTP/2 client sends it."""
    from tritonclient.grpc import service_pb2 as pb

    request = pb.ModelInferRequest(model_name=model.name)
    for name, tensor in model.tensors.items():
        request.inputs.add(name=name, datatype=model.datatypes[name], shape=tensor.shape)
        raw = np.ascontiguousarray(tensor, DTYPES[model.datatypes[name]]).tobytes()
        request.raw_input_contents.append(raw)
    body: bytes = request.SerializeToString()
    return GRPC_FRAME.pack(0, len(body)) + body


def read_oip_grpc(body: bytes) -> Tensors:
    """The tensors of a ModelInferResponse, raw or typed."""
    from tritonclient.grpc import service_pb2 as pb

    reply = pb.ModelInferResponse.FromString(body)
    found = {}
    for number, output in enumerate(reply.outputs):
        dtype = DTYPES[output.datatype]
        if reply.raw_output_contents:
            tensor = np.frombuffer(reply.raw_output_contents[number], dtype)
        else:
            fields = {"FP32": "fp32_contents", "INT64": "int64_contents"}
            tensor = np.array(getattr(output.contents, fields[output.datatype]), dtype)
        found[output.name] = tensor.reshape(tuple(output.shape))
    return found
