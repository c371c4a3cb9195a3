"""Encoding of OIP's HTTP responses: JSON, with the binary tensor data extension.

Specification: Triton's ``docs/protocol`` and ``http_server.cc``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from modelport.gateway.protocols.oip.shared_memory import SharedTensors
from modelport.gateway.types import Array, Datatype, InferResponse
from modelport.gateway.wire import json_tensors, json_text, json_writer, raw_tensors
from modelport.gateway.wire.json_writer import PIECE
from modelport.gateway.wire.raw_tensors import Buffer

#: Number of cached parts of responses, each of some hundred bytes.
HEADS = 4096
#: To look up a member of an enumeration takes as long as the rest of ``is_large``.
_TEXT = Datatype.BYTES


@dataclass(slots=True)
class ResponseFormat:
    """Requested encoding of the outputs: JSON, binary data after the JSON, or shared memory."""

    binary: bool = False
    by_output: dict[str, bool] = field(default_factory=dict)
    shared: SharedTensors | None = None


def encode(response: InferResponse, form: ResponseFormat) -> tuple[Buffer, list[Buffer]]:
    """Encode a response as its JSON part and the binary parts after it.

    Raises:
        InvalidArgument: JSON cannot represent an output.
    """
    outputs: list[Buffer] = []
    large = False
    blobs: list[Buffer] = []
    for tensor in response.outputs:
        head = _output_head(tensor.name, tensor.datatype, tensor.data.shape)
        if form.shared is not None and form.shared.write(tensor):
            outputs.append(head + b"}")
        elif form.by_output.get(tensor.name, form.binary):
            blob = raw_tensors.encode(tensor)
            blobs.append(blob)
            outputs.append(b'%b,"parameters":{"binary_data_size":%d}}' % (head, len(blob)))
        elif tensor.data.size <= PIECE and (
            tensor.datatype is not _TEXT or not json_writer.is_large(tensor.data)
        ):
            outputs.append(b'%b,"data":%b}' % (head, _values(json_tensors.encode(tensor))))
        else:
            large = True
            parts = json_writer.parts(json_tensors.encode(tensor))
            outputs.append(json_writer.join((head, b',"data":', *parts, b"}")))
    head = _reply_head(response.model_name, response.model_version)
    if response.id:
        head = b'{"id":%b,%b' % (json_text.dumps(response.id), head[1:])
    if response.parameters:
        head += b'"parameters":%b,' % json_text.dumps_any(_parameters(response))
    if large:
        pieces: list[Buffer] = []
        for output in outputs:
            pieces += (b"," if pieces else b'"outputs":[', output)
        return json_writer.join((head, *pieces, b"]}")), blobs
    return b'%b"outputs":[%b]}' % (head, b",".join(outputs)), blobs


def joined(text: Buffer, blobs: list[Buffer]) -> tuple[Buffer, int]:
    """Join the parts of a response; return its body, and the length of the JSON part of it.

    The length is 0 if no binary data follows: then the body is JSON alone.
    """
    if not any(map(len, blobs)):
        return text, 0
    return json_writer.join((text, *blobs)), len(text)


@lru_cache(HEADS)
def _reply_head(model_name: str, model_version: int) -> bytes:
    document = {"model_name": model_name, "model_version": str(model_version)}
    return json_text.dumps(document)[:-1] + b","


@lru_cache(HEADS)
def _output_head(name: str, datatype: Datatype, shape: tuple[int, ...]) -> bytes:
    """Encode an output up to its data."""
    return json_text.dumps({"name": name, "datatype": datatype.value, "shape": shape})[:-1]


def is_large(response: InferResponse, form: ResponseFormat) -> bool:
    """Whether encoding takes more than a millisecond; binary outputs do not."""
    for tensor in response.outputs:  # a loop is faster than ``any``, for every response
        if tensor.data.size <= PIECE and tensor.datatype is not _TEXT:
            continue
        in_json = not form.by_output.get(tensor.name, form.binary)
        if (in_json or tensor.datatype is _TEXT) and json_writer.is_large(tensor.data):
            return True
    return False


def _parameters(response: InferResponse) -> dict[str, Any]:
    parameters = response.parameters.items()
    return {k: json_text.number(v) if type(v) is float else v for k, v in parameters}


def _values(data: Array) -> bytes:
    if data.dtype == object:
        return json_text.dumps(data.tolist())
    text = json_text.dumps(data)
    # orjson writes null for NaN and infinities, and for no other number.
    if data.dtype.kind == "f" and text.find(b"null") >= 0:
        return json_text.dumps(json_text.numbers(data))
    return text
