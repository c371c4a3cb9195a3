"""TensorFlow Serving's REST bodies: rows and columns ↔ tensors.

Wire contract: tensorflow/serving ``g3doc/api_rest.md`` and ``util/json_tensor.cc``. Unlike there, a
whole number that its type cannot hold is refused, where TensorFlow wraps it, and UINT16 is taken.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.protocols.tfserving.json_value import (
    B64,
    TYPES,
    WHOLE,
    examine,
    is_base64,
    quoted,
    unescape,
    wrong,
    wrong_keys,
    wrong_row,
)
from modelport.gateway.protocols.tfserving.servable import (
    Decoded,
    Endpoint,
    Servable,
    ServableVersion,
    type_name,
)
from modelport.gateway.runtime import offload
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, Tensor
from modelport.gateway.wire import json_text, json_writer, raw
from modelport.gateway.wire.long_array import LongArray
from modelport.gateway.wire.raw import Buffer

#: Rows of named inputs and base64 objects have a key for every value.
MAX_KEYS = 500_000
_BYTES_SUFFIX = "_bytes"
_DATA, _ENVELOPE = "data", {"data", "target"}
_BINARY_ONLY = (Datatype.FP16, Datatype.BF16)


def parse(body: bytes, max_keys: int = MAX_KEYS) -> dict[str, Any]:
    """The object that every request is.

    Raises:
        InvalidArgument: it is not; or ``signature_name`` is no string.
    """
    if not body:
        raise InvalidArgument("JSON Parse error: The document is empty")
    try:
        document = json_text.loads(body, max_keys)
    except InvalidArgument as error:
        raise InvalidArgument(f"JSON Parse error: {error}") from error
    if type(document) is not dict:
        raise wrong(document, "Is not object")
    if type(document.get("signature_name", "")) is not str:
        raise wrong(
            document, "not formatted correctly. 'signature_name' key must be a string value."
        )
    return document


def decode(body: bytes, version: ServableVersion) -> Decoded:
    """A ``:predict`` request for the signature that it names.

    Raises:
        InvalidArgument: in TensorFlow Serving's words where it has some.
        Unsupported: an input's type has no form in JSON.
    """
    document = parse(body)
    servable = version.servable(document.get("signature_name", ""))
    if not servable.inputs:
        raise InvalidArgument("Failed to get input map for signature: DEFAULT")
    by_row = "instances" in document
    if by_row and "inputs" in document:
        raise wrong(
            document,
            "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist ",
        )
    if by_row:
        rows = document["instances"]
        if not json_text.is_array(rows):
            raise wrong(document, "Expecting 'instances' to be an list/array")
        if not len(rows):
            raise wrong(document, "No values in 'instances' array")
        return Decoded(servable, _rows(rows, servable), by_row=True)
    if "inputs" not in document:
        raise InvalidArgument("Missing 'inputs' or 'instances' key")
    return Decoded(servable, _columns(document["inputs"], servable))


def _rows(rows: Any, servable: Servable) -> list[Tensor]:
    inputs = servable.inputs
    if type(rows) is not LongArray and len(inputs) == 1 and _are_in_envelopes(rows, inputs):
        rows = _contents(rows, next(iter(inputs.values())))
    if type(rows) is LongArray or type(rows[0]) is not dict or is_base64(rows[0]):
        if len(inputs) > 1:
            raise InvalidArgument(
                "instances is a plain list, but expecting list of objects as multiple input "
                "tensors required as per tensorinfo_map"
            )
        (endpoint,) = inputs.values()
        data = _array(endpoint, rows)
        if data is None:
            raise wrong_row(_plain(rows), endpoint)
        return [_tensor(endpoint, data)]
    names = rows[0].keys()
    fits = servable.required <= names <= inputs.keys()
    if not fits or not all(type(row) is dict and row.keys() == names for row in rows):
        raise wrong_keys(rows, inputs.keys(), servable.required)
    tensors = []
    for name in names:
        column = [row[name] for row in rows]
        data = _array(inputs[name], column)
        if data is None:
            raise wrong_row(column, inputs[name], named=True)
        tensors.append(_tensor(inputs[name], data))
    return tensors


def _are_in_envelopes(rows: list[Any], inputs: Mapping[str, Endpoint]) -> bool:
    """Whether rows are ``{"data": ..., "target": ...}``, as TorchServe's KServe handlers take."""
    return _DATA not in inputs and all(
        type(row) is dict and _DATA in row and row.keys() <= _ENVELOPE for row in rows
    )


def _contents(rows: list[Any], endpoint: Endpoint) -> list[Any]:
    """What is in the envelopes; a picture is base64 there."""
    contents = [row[_DATA] for row in rows]
    if endpoint.picture is None:
        return contents
    return [{B64: each} if type(each) is str else each for each in contents]


def _columns(value: Any, servable: Servable) -> list[Tensor]:
    inputs = servable.inputs
    if type(value) is not dict or is_base64(value):
        if len(inputs) > 1:
            raise InvalidArgument(
                "inputs is a plain value/list, but expecting an object as multiple input tensors "
                "required as per tensorinfo_map"
            )
        value = {next(iter(inputs)): value}
    tensors = []
    for name, endpoint in inputs.items():
        if name not in value:
            if endpoint.optional:
                continue
            raise InvalidArgument(f"Missing named input: {name} in 'inputs' object.")
        data = _array(endpoint, value[name])
        if data is None:
            examine(_plain(value[name]), endpoint)
            raise InvalidArgument(f"input '{name}' holds a value out of range")
        tensors.append(_tensor(endpoint, data))
    return tensors


def _tensor(endpoint: Endpoint, data: Array) -> Tensor:
    return Tensor(endpoint.name, endpoint.datatype, data)


def _array(endpoint: Endpoint, value: Any) -> Array | None:
    """``value``, nested lists, as an array; None where it is none: ``wrong_row`` knows why."""
    if type(value) is LongArray:
        return _long(endpoint, value)
    shape, items = _flatten(value)
    if shape is None:
        return None
    types = set(map(type, items))
    if types == {dict} and endpoint.picture is not None:
        _check_rank(endpoint, shape)
        return endpoint.pictures([unescape(item) for item in items], shape)
    if not _takes(endpoint, shape, types, value):
        return None
    datatype = endpoint.datatype
    if datatype is Datatype.BYTES:
        return raw.object_array([_string(item) for item in items], tuple(shape))
    try:
        with np.errstate(over="ignore"):  # beyond FP32 is infinity, as in C
            return np.array(items, NUMPY_DTYPES[datatype]).reshape(shape)
    except OverflowError:
        return None


def _long(endpoint: Endpoint, value: LongArray) -> Array | None:
    if not _takes(endpoint, value.shape, value.types, value):
        return None
    try:
        return value.array(NUMPY_DTYPES[endpoint.datatype])
    except OverflowError:
        return None


def _check_rank(endpoint: Endpoint, shape: Sequence[int]) -> None:
    if len(shape) > raw.MAX_RANK:
        raise InvalidArgument(
            f"input '{endpoint.name}' has {len(shape)} dimensions, at most {raw.MAX_RANK}"
        )


def _takes(endpoint: Endpoint, shape: Sequence[int], types: set[type], value: Any) -> bool:
    """Whether the input's values may have these JSON types."""
    _check_rank(endpoint, shape)
    datatype = endpoint.datatype
    if datatype in _BINARY_ONLY:
        raise Unsupported(
            f"Conversion of JSON Value: {quoted(value)} to type: {type_name(datatype)}; send "
            f"input '{endpoint.name}' over gRPC"
        )
    return types <= TYPES.get(datatype, WHOLE)


def _plain(value: Any) -> Any:
    """The beginning of a long array, to say what is wrong with it."""
    return value.head() if type(value) is LongArray else value


def _flatten(value: Any) -> tuple[list[int] | None, list[Any]]:
    """The shape of nested lists and what is in them; None: they are no rectangle."""
    if type(value) is not list:
        return [], [value]
    shape, items = [len(value)], value
    while items and type(items[0]) is list:
        if set(map(type, items)) != {list}:
            return None, []
        lengths = set(map(len, items))
        if len(lengths) != 1:
            return None, []
        shape.append(lengths.pop())
        items = list(itertools.chain.from_iterable(items))
    return shape, items


def _string(item: Any) -> bytes:
    return item.encode() if type(item) is str else unescape(item)


# -- replies ---------------------------------------------------------------------------------------


def encode(outputs: Iterable[Tensor], by_row: bool, rows_name: str = "predictions") -> Buffer:
    """Rows, one for each batch element, or ``outputs``; one output has no name.

    Raises:
        InvalidArgument: an output has no form in JSON, or no batch dimension to make rows of.
    """
    values = {tensor.name: _values(tensor) for tensor in outputs}
    if not by_row:
        columns = next(iter(values.values())) if len(values) == 1 else values
        return json_writer.dumps({"outputs": columns})
    batch = -1
    for name, value in values.items():
        if not value.ndim:
            raise InvalidArgument(f"Tensor name: {name} has no shape information ")
        if batch not in (-1, len(value)):
            raise InvalidArgument(
                f"Tensor name: {name} has inconsistent batch size: {len(value)} expecting: {batch}"
            )
        batch = len(value)
    rows = next(iter(values.values())) if len(values) == 1 else json_writer.Rows(values)
    return json_writer.dumps({rows_name: rows})


def _values(tensor: Tensor) -> Array:
    """What is written: numbers, or an object array of strings and base64 objects."""
    if tensor.datatype in _BINARY_ONLY:
        raise InvalidArgument(
            f"Failed to write JSON value for tensor type: {type_name(tensor.datatype)}; ask for "
            f"output '{tensor.name}' over gRPC"
        )
    if tensor.datatype is not Datatype.BYTES:
        return tensor.data
    flat, written = tensor.data.reshape(-1), np.empty(tensor.data.size, dtype=object)
    as_base64 = tensor.name.endswith(_BYTES_SUFFIX)
    try:
        for start in range(0, len(flat), raw.PIECE):
            items = flat[start : start + raw.PIECE]
            written[start : start + raw.PIECE] = [
                {B64: base64.b64encode(item).decode()} if as_base64 else item.decode()
                for item in items
            ]
            offload.checkpoint()
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"output '{tensor.name}' holds bytes that are not UTF-8; only outputs whose names end "
            f"in '{_BYTES_SUFFIX}' are written as base64, or ask for it over gRPC"
        ) from error
    return written.reshape(tensor.data.shape)
