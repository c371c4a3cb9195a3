"""A model behind one ASGI function and nothing else: OIP's JSON, binary tensors and gRPC messages.

It has no validation, no metrics and no error handling.
"""

from __future__ import annotations

from typing import Any

import numpy
import orjson
from onnx_model import OnnxModel
from tritonclient.grpc import service_pb2 as pb

DATATYPES = {numpy.dtype(numpy.float32): "FP32", numpy.dtype(numpy.int64): "INT64"}
BINARY_SIZE = b"inference-header-content-length"


async def read(receive: Any) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    while message.get("more_body", False):
        message = await receive()
        body += message.get("body", b"")
    return body


async def answer(send: Any, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


class Bare:
    """The model and its three encodings."""

    def __init__(self, path: str) -> None:
        self.model = OnnxModel(path)

    async def http(self, scope: Any, receive: Any, send: Any) -> None:
        if not scope["path"].endswith("/infer"):
            await answer(send, b"{}")
            return
        body = await read(receive)
        size = next((value for name, value in scope["headers"] if name == BINARY_SIZE), None)
        if size is None:
            reply = self.json(body)
            await answer(send, reply, (b"content-type", b"application/json"))
        else:
            reply, head = self.binary(body, int(size))
            await answer(send, reply, (BINARY_SIZE, str(head).encode()))

    def json(self, body: bytes) -> bytes:
        kinds = self.model.inputs
        inputs = {
            tensor["name"]: numpy.array(tensor["data"], kinds[tensor["name"]]).reshape(
                tensor["shape"]
            )
            for tensor in orjson.loads(body)["inputs"]
        }
        outputs = [
            {"name": name, "datatype": DATATYPES[y.dtype], "shape": y.shape, "data": y.ravel()}
            for name, y in self.model.run(inputs).items()
        ]
        return orjson.dumps({"outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)

    def binary(self, body: bytes, size: int) -> tuple[bytes, int]:
        """Answer a binary request; return the reply, and the size of its JSON part."""
        inputs, position = {}, size
        for tensor in orjson.loads(body[:size])["inputs"]:
            kind = numpy.dtype(self.model.inputs[tensor["name"]])
            length = tensor["parameters"]["binary_data_size"]
            values = numpy.frombuffer(body, kind, length // kind.itemsize, position)
            inputs[tensor["name"]] = values.reshape(tensor["shape"])
            position += length
        parts, outputs = [], []
        for name, y in self.model.run(inputs).items():
            parts.append(y.tobytes())
            entry = {"name": name, "datatype": DATATYPES[y.dtype], "shape": y.shape}
            outputs.append(entry | {"parameters": {"binary_data_size": len(parts[-1])}})
        head = orjson.dumps({"outputs": outputs})
        return head + b"".join(parts), len(head)

    def grpc(self, request: Any) -> Any:
        kinds = self.model.inputs
        inputs = {
            tensor.name: numpy.frombuffer(raw, kinds[tensor.name]).reshape(tensor.shape)
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        reply = pb.ModelInferResponse(model_name=request.model_name)
        for name, y in self.model.run(inputs).items():
            reply.outputs.add(name=name, datatype=DATATYPES[y.dtype], shape=y.shape)
            reply.raw_output_contents.append(y.tobytes())
        return reply
