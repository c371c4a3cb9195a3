"""JSON of TensorFlow Serving's ``:predict``, in row and column format.

Specification: TensorFlow Serving's ``g3doc/api_rest.md`` and ``util/json_tensor.cc``. Unlike there,
integers out of range are refused instead of wrapped, and UINT16 is supported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.inference.text.text_infer import TEXT_SIGNATURE
from modelport.gateway.protocols import text_inputs
from modelport.gateway.protocols.tfserving.json_errors import (
    B64,
    TYPES,
    WHOLE,
    escape,
    examine,
    is_base64,
    quoted,
    unescape,
    wrong,
    wrong_keys,
    wrong_row,
)
from modelport.gateway.protocols.tfserving.servable_signatures import (
    Decoded,
    ServableSignature,
    ServableVersion,
    SignatureTensor,
    type_name,
)
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, Tensor
from modelport.gateway.wire import json_tensors, json_text, json_writer, raw_tensors
from modelport.gateway.wire.long_array import LongArray
from modelport.gateway.wire.raw_tensors import Buffer

#: Limit of keys; rows of named inputs and base64 objects have one for every value.
MAX_KEYS = 500_000
_BYTES_SUFFIX = "_bytes"
_DATA, _ENVELOPE = "data", {"data", "target"}
_BINARY_ONLY = (Datatype.FP16, Datatype.BF16)


def parse(body: bytes, max_keys: int = MAX_KEYS) -> dict[str, Any]:
    """Parse a request.

    Raises:
        InvalidArgument: It is not a JSON object, or ``signature_name`` is not a string.
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
    """Decode a ``:predict`` request.

    Raises:
        InvalidArgument: The request is invalid, mostly in TensorFlow Serving's words.
        Unsupported: JSON cannot represent an input's type.
    """
    document = parse(body)
    try:
        return _decoded(document, version)
    finally:
        json_text.discard(document, len(body))


def _decoded(document: dict[str, Any], version: ServableVersion) -> Decoded:
    servable = version.servable(document.get("signature_name") or _texts(document, version))
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


def _texts(document: dict[str, Any], version: ServableVersion) -> str:
    """The signature for texts, if the request has some."""
    value = document.get("instances", document.get("inputs"))
    texts = version.text_names and text_inputs.are_texts(value, version.text_names)
    return TEXT_SIGNATURE if texts else ""


def _rows(rows: Any, servable: ServableSignature) -> list[Tensor]:
    inputs = servable.inputs
    if type(rows) is not LongArray and len(inputs) == 1 and _are_in_envelopes(rows, inputs):
        rows = _contents(rows, next(iter(inputs.values())))
    if type(rows) is LongArray or type(rows[0]) is not dict or is_base64(rows[0]):
        spec = servable.only_input
        if spec is None:
            raise InvalidArgument(
                "instances is a plain list, but expecting list of objects as multiple input "
                "tensors required as per tensorinfo_map"
            )
        data = _array(spec, rows)
        if data is None:
            raise wrong_row(_plain(rows), spec)
        return [_tensor(spec, data)]
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


def _are_in_envelopes(rows: list[Any], inputs: Mapping[str, SignatureTensor]) -> bool:
    """Whether rows are the envelopes ``{"data": ..., "target": ...}`` of TorchServe with KServe."""
    return _DATA not in inputs and all(
        type(row) is dict and _DATA in row and row.keys() <= _ENVELOPE for row in rows
    )


def _contents(rows: list[Any], spec: SignatureTensor) -> list[Any]:
    """Extract the data of the envelopes; images are base64 strings there."""
    contents = [row[_DATA] for row in rows]
    if spec.image is None:
        return contents
    return [{B64: each} if type(each) is str else each for each in contents]


def _columns(value: Any, servable: ServableSignature) -> list[Tensor]:
    inputs = servable.inputs
    if type(value) is not dict or is_base64(value):
        if servable.only_input is None:
            raise InvalidArgument(
                "inputs is a plain value/list, but expecting an object as multiple input tensors "
                "required as per tensorinfo_map"
            )
        value = {servable.only_input.name: value}
    tensors = []
    for name, spec in inputs.items():
        if name not in value:
            if spec.optional:
                continue
            raise InvalidArgument(f"Missing named input: {name} in 'inputs' object.")
        data = _array(spec, value[name])
        if data is None:
            examine(_plain(value[name]), spec)
            raise InvalidArgument(f"input '{name}' holds a value out of range")
        tensors.append(_tensor(spec, data))
    return tensors


def _tensor(spec: SignatureTensor, data: Array) -> Tensor:
    return Tensor(spec.name, spec.datatype, data)


def _array(spec: SignatureTensor, value: Any) -> Array | None:
    """Convert nested lists to an array, or return None; ``wrong_row`` finds the reason."""
    dtype, is_long = NUMPY_DTYPES[spec.datatype], type(value) is LongArray
    shape, items = (value.shape, value) if is_long else _flatten(value)
    if shape is None:
        return None
    types = value.types if is_long else set(map(type, items))
    if types == {dict} and spec.image is not None:
        _check_rank(spec, shape)
        return spec.images([unescape(item) for item in items], shape)
    if not _takes(spec, shape, types, value):
        return None
    try:
        if is_long:
            array: Array = value.array(dtype)
            return array
        if spec.datatype is Datatype.BYTES:
            return raw_tensors.object_array([_string(item) for item in items], tuple(shape))
        with np.errstate(over="ignore"):  # values beyond FP32 become infinity, as in C
            return np.array(items, dtype).reshape(shape)
    except OverflowError:
        return None


def _check_rank(spec: SignatureTensor, shape: Sequence[int]) -> None:
    if len(shape) > raw_tensors.MAX_RANK:
        raise InvalidArgument(
            f"input '{spec.name}' has {len(shape)} dimensions, at most {raw_tensors.MAX_RANK}"
        )


def _takes(spec: SignatureTensor, shape: Sequence[int], types: set[type], value: Any) -> bool:
    """Whether the input accepts values of these JSON types."""
    _check_rank(spec, shape)
    datatype = spec.datatype
    if datatype in _BINARY_ONLY:
        raise Unsupported(
            f"Conversion of JSON Value: {quoted(value)} to type: {type_name(datatype)}; send "
            f"input '{spec.name}' over gRPC"
        )
    return types <= TYPES.get(datatype, WHOLE)


def _plain(value: Any) -> Any:
    """Return the beginning of a long array, for an error message."""
    return value.head() if type(value) is LongArray else value


def _flatten(value: Any) -> tuple[list[int] | None, list[Any]]:
    """Return shape and values of nested lists; the shape is None if they are not rectangular."""
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
    """Encode outputs by row or by column; a single output has no name.

    Raises:
        InvalidArgument: JSON cannot represent an output, or it has no batch dimension for rows.
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
    """Convert to numbers, or to an object array of strings and base64 objects."""
    if tensor.datatype in _BINARY_ONLY:
        raise InvalidArgument(
            f"Failed to write JSON value for tensor type: {type_name(tensor.datatype)}; ask for "
            f"output '{tensor.name}' over gRPC"
        )
    if tensor.datatype is not Datatype.BYTES:
        return tensor.data
    as_base64 = tensor.name.endswith(_BYTES_SUFFIX)
    try:
        return json_tensors.converted(tensor.data, escape if as_base64 else bytes.decode)
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"output '{tensor.name}' holds bytes that are not UTF-8; only outputs whose names end "
            f"in '{_BYTES_SUFFIX}' are written as base64, or ask for it over gRPC"
        ) from error
