"""Named tensors in the body of a TorchServe row; this module runs inside TorchServe with numpy.

Requests and answers have the Open Inference Protocol's HTTP bodies, so that its
clients work against TorchServe's ``/v2/models/NAME/infer`` as against ``/predictions/NAME``:

    JSON     {"id": "a", "inputs": [{"name", "datatype", "shape", "data"}], "outputs": [{"name"}]}
    binary   the same JSON, where inputs have "parameters": {"binary_data_size": N} instead of
             "data", and behind its last brace the N bytes of each such input, in order:
             little-endian, row-major

The HTTP header ``Inference-Header-Content-Length`` is the size of the JSON part. Without it, as in
TorchServe's gRPC API, the JSON part ends where its object ends. The content types are
``application/json`` and ``application/octet-stream``. Outputs are JSON unless ``binary_data`` of
the output or ``binary_data_output`` of the request is true; FP16 and BF16 travel as bytes only.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

HEADER_LENGTH = "Inference-Header-Content-Length"
JSON, BINARY = "application/json", "application/octet-stream"

#: numpy has no BF16: its bit pattern stands for it.
DTYPES = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),
}
BINARY_ONLY = ("FP16", "BF16")
#: Types of JSON values by kind of dtype; integers for all others.
_JSON_TYPES: Mapping[str, set[type]] = {"b": {bool}, "f": {int, float}}

BAD_REQUEST = (400, "Bad Request")
MODEL_FAILED = (500, "Internal Server Error")

_decoder = json.JSONDecoder()


class RowError(Exception):
    """An error in one row; the message goes to its sender."""

    def __init__(self, message: str, status: tuple[int, str] = BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class EnvelopeTensor:
    """A named tensor with its datatype."""

    name: str
    datatype: str
    data: Array


@dataclass
class Request:
    """The inputs and outputs of a row.

    ``outputs`` are the requested ones, None for all; ``binary`` is the default form of outputs.
    """

    id: str
    inputs: dict[str, EnvelopeTensor]
    outputs: dict[str, bool] | None
    binary: bool


def decode(parameters: Mapping[str, Any], headers: Mapping[str, Any]) -> Request:
    """Decode the request in a row.

    Args:
        parameters: the row as TorchServe gives it to a handler; JSON may be parsed already.
        headers: headers of the HTTP request.

    Raises:
        RowError: the row is malformed; the message names the member or the input.
    """
    document, body = _split(_body(parameters), _header_length(headers))
    row_id = document.get("id", "")
    if not isinstance(row_id, str):
        raise RowError("'id' must be a string")
    binary = bool(_parameters(document).get("binary_data_output", False))
    return Request(row_id, _inputs(document, body), _outputs(document), binary)


def encode(
    row_id: str, model: str, version: str, outputs: Sequence[tuple[EnvelopeTensor, bool]]
) -> tuple[bytes, int | None]:
    """Encode an answer; return its body and, if bytes follow the JSON part, the size of that part.

    Args:
        outputs: in order, each with whether to send it as bytes.
    """
    document: dict[str, Any] = {"id": row_id} if row_id else {}
    document["model_name"], document["model_version"] = model, version
    document["outputs"] = entries = []
    blobs = []
    for tensor, binary in outputs:
        shape = list(tensor.data.shape)
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": shape}
        if binary:
            blobs.append(np.ascontiguousarray(tensor.data).tobytes())
            entry["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            entry["data"] = tensor.data.reshape(-1).tolist()
        entries.append(entry)
    text = json.dumps(document, separators=(",", ":")).encode()
    return b"".join([text, *blobs]), len(text) if blobs else None


def _body(parameters: Mapping[str, Any]) -> Any:
    """The row's ``body`` (HTTP) or ``data`` (forms and gRPC), as in TorchServe's own handlers."""
    for name in ("body", "data"):
        if name in parameters:
            return parameters[name]
    raise RowError(
        f"the row has no 'body' or 'data'; send {JSON}, or JSON with bytes behind it as {BINARY}"
    )


def _header_length(headers: Mapping[str, Any]) -> int | None:
    for name, value in headers.items():
        if name.lower() == HEADER_LENGTH.lower():
            if not (isinstance(value, str) and value.isascii() and value.isdigit()):
                raise RowError(f"{HEADER_LENGTH} must be a number of bytes, not '{value}'")
            return int(value)
    return None


def _split(body: Any, header_length: int | None) -> tuple[dict[str, Any], memoryview]:
    """The JSON part and the bytes behind it."""
    rest = memoryview(b"")
    document = body
    try:
        if isinstance(body, str):
            document = json.loads(body)
        elif isinstance(body, bytes | bytearray):
            if header_length is None:
                document, header_length = _leading_value(bytes(body))
            elif header_length <= len(body):
                document = json.loads(body[:header_length])
            else:
                raise RowError(f"{HEADER_LENGTH} is {header_length}, the body has {len(body)}")
            rest = memoryview(body)[header_length:]
    except (ValueError, RecursionError) as error:
        raise RowError(f"the body does not start with JSON: {error}") from None
    if not isinstance(document, dict):
        raise RowError("the body must be a JSON object with 'inputs'")
    return document, rest


def _leading_value(body: bytes) -> tuple[Any, int]:
    """Parse the JSON value at the start of ``body``; return it and its size in bytes.

    Latin-1 makes one character of every byte, and JSON's own delimiters are ASCII: what follows
    the value cannot be mistaken for a part of it.
    """
    text = body.decode("latin-1")
    document, end = _decoder.raw_decode(text, len(text) - len(text.lstrip(" \t\r\n")))
    return (document if text[:end].isascii() else json.loads(body[:end])), end


def _parameters(owner: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = owner.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise RowError("'parameters' must be an object")
    return parameters


def _inputs(document: Mapping[str, Any], body: memoryview) -> dict[str, EnvelopeTensor]:
    inputs = document.get("inputs")
    if not isinstance(inputs, list):
        raise RowError("'inputs' must be an array of named tensors")
    tensors: dict[str, EnvelopeTensor] = {}
    offset = 0
    for item in inputs:
        name, datatype, shape = _heading(item)
        if name in tensors:
            raise RowError(f"input '{name}' is given twice")
        size = _parameters(item).get("binary_data_size")
        if (size is None) == ("data" not in item):
            raise RowError(f"input '{name}' needs either 'data' or 'binary_data_size'")
        if size is None:
            array = _from_json(name, datatype, shape, item["data"])
        elif type(size) is int and 0 <= size <= len(body) - offset:
            array = _from_bytes(name, datatype, shape, body[offset : offset + size])
            offset += size
        else:
            raise RowError(
                f"'binary_data_size' of input '{name}' is {size}, but {len(body) - offset} bytes "
                "are left in the body"
            )
        tensors[name] = EnvelopeTensor(name, datatype, array)
    left = bytes(body[offset:])
    if left and (offset or left.strip()):
        raise RowError(f"{len(left)} bytes follow the last input")
    return tensors


def _heading(item: Any) -> tuple[str, str, list[int]]:
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(name, str):
        raise RowError("every input needs a 'name'")
    datatype, shape = item.get("datatype"), item.get("shape")
    if not isinstance(datatype, str) or datatype not in DTYPES:
        raise RowError(f"the 'datatype' of input '{name}' must be one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        raise RowError(f"the 'shape' of input '{name}' must be an array of sizes")
    return name, datatype, shape


def _from_bytes(name: str, datatype: str, shape: Sequence[int], raw: memoryview) -> Array:
    dtype = DTYPES[datatype]
    size = math.prod(shape) * dtype.itemsize
    if len(raw) != size:
        raise RowError(f"input '{name}' of shape {shape} needs {size} bytes, not {len(raw)}")
    # Copied because they may lie unaligned behind the JSON text, and tensors need alignment.
    return np.frombuffer(raw, dtype).reshape(shape).copy()


def _from_json(name: str, datatype: str, shape: Sequence[int], data: Any) -> Array:
    """``data``, flat or nested, as an array; nothing is converted silently."""
    dtype, count = DTYPES[datatype], math.prod(shape)
    if datatype in BINARY_ONLY:
        raise RowError(f"input '{name}' is {datatype}: send it with 'binary_data_size'")
    if not isinstance(data, list):
        raise RowError(f"the 'data' of input '{name}' must be an array")
    kinds = set(map(type, data))
    while kinds == {list}:
        data = list(itertools.chain.from_iterable(data))
        kinds = set(map(type, data))
    if len(data) != count:
        raise RowError(f"input '{name}' of shape {shape} needs {count} values, not {len(data)}")
    allowed = _JSON_TYPES.get(dtype.kind, {int})
    if not kinds <= allowed:
        wrong = ", ".join(sorted(kind.__name__ for kind in kinds - allowed))
        raise RowError(f"input '{name}' is {datatype}, but its 'data' holds {wrong}")
    try:
        with np.errstate(over="ignore"):  # values beyond FP32 become infinity, as in C
            return np.array(data, dtype).reshape(shape)
    except OverflowError:
        raise RowError(f"a value of input '{name}' does not fit {datatype}") from None


def _outputs(document: Mapping[str, Any]) -> dict[str, bool] | None:
    asked = document.get("outputs")
    if asked is None:
        return None
    if not isinstance(asked, list):
        raise RowError("'outputs' must be an array")
    outputs = {}
    for item in asked:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str):
            raise RowError("every output needs a 'name'")
        outputs[name] = bool(_parameters(item).get("binary_data", False))
    return outputs
