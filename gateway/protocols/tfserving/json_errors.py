"""JSON values in TensorFlow Serving's requests, and its messages for invalid ones.

To find the error, an invalid value is traversed again, in the order of TensorFlow Serving's
``util/json_tensor.cc``. Valid requests pay nothing for that.
"""

from __future__ import annotations

import base64
import json
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols.tfserving.servable_signatures import SignatureTensor, type_name
from modelport.gateway.types import NUMPY_DTYPES, Datatype, dims_text
from modelport.gateway.wire.long_array import LongArray

MAX_QUOTED = 256
#: Limit of the values traversed to find an error: some tenths of a second.
MAX_EXAMINED = 200_000
B64 = "b64"
_SPACE = string.whitespace.encode()
#: JSON types of elements by datatype; the others take integers.
TYPES: Mapping[Datatype, frozenset[type]] = {
    Datatype.BOOL: frozenset({bool}),
    Datatype.BYTES: frozenset({str, dict}),
    Datatype.FP32: frozenset({int, float}),
    Datatype.FP64: frozenset({int, float}),
}
WHOLE = frozenset({int})
_JSON_NAMES = {
    int: "Number",
    float: "Number",
    str: "String",
    list: "Array",
    dict: "Object",
    LongArray: "Array",
    type(None): "Null",
}


def is_base64(value: dict[str, Any]) -> bool:
    return len(value) == 1 and type(value.get(B64)) is str


def escape(content: bytes) -> dict[str, str]:
    """Encode bytes as ``{"b64": ...}``."""
    return {B64: base64.b64encode(content).decode()}


def unescape(value: dict[str, Any]) -> bytes:
    """Decode ``{"b64": ...}``; as in TensorFlow Serving, padding is optional and space ignored."""
    if not is_base64(value):
        raise wrong(value, "not formatted correctly for base64 data")
    try:
        text = value[B64].encode("ascii").translate(None, _SPACE)
        padding = b"" if text.endswith(b"=") else b"=" * (-len(text) % 4)
        return base64.b64decode(text + padding, validate=True)
    except ValueError as error:
        raise InvalidArgument("Unable to base64 decode") from error


def wrong_keys(
    rows: Sequence[Any], names: Collection[str], required: Collection[str]
) -> InvalidArgument:
    """Make the error for the first row whose keys are not the inputs ``names``."""
    for index, row in enumerate(rows):
        if type(row) is not dict:
            return InvalidArgument(f"Expecting object but got list at item {index} of input list")
        unknown = [key for key in row if key not in names]
        if unknown:
            return _element(
                index,
                InvalidArgument(
                    f"JSON object: does not have named input: {unknown[0][:MAX_QUOTED]}"
                ),
                unknown[0],
            )
        if not set(required) <= row.keys() or row.keys() != rows[0].keys():
            wanted = ",".join(sorted(names))
            return InvalidArgument(
                f"Failed to process element: {index} of 'instances' list. JSON object: "
                f"{quoted(row)} keys must be equal to: {wanted}"
            )
    return InvalidArgument("'instances' do not name the model's inputs")


def wrong_row(rows: list[Any], spec: SignatureTensor, named: bool = False) -> InvalidArgument:
    """Make the error for the first row that is not a tensor, or differs in shape."""
    first: list[int] | None = None
    left = iter(range(MAX_EXAMINED))
    for index, row in enumerate(rows):
        if not named and type(row) is dict and not is_base64(row):
            return InvalidArgument(
                f"Expecting value/list but got object at item {index} of input list"
            )
        try:
            shape = examine(row, spec, left)
            if first is not None and shape != first:
                raise InvalidArgument(
                    f"Expecting shape {dims_text(first)} but got: {dims_text(shape)}"
                )
        except InvalidArgument as error:
            return _element(index, error, spec.name if named else "")
        first = shape
    return InvalidArgument(f"input '{spec.name}' holds a value out of range")


def _element(index: int, error: InvalidArgument, key: str) -> InvalidArgument:
    place = f"{index} key: {key[:MAX_QUOTED]}" if key else str(index)
    return InvalidArgument(
        f"Failed to process element: {place} of 'instances' list. Error: INVALID_ARGUMENT: {error}"
    )


def examine(value: Any, spec: SignatureTensor, left: Iterator[int] | None = None) -> list[int]:
    """Return the shape of ``value``, and check at most as many values as are ``left``.

    Raises:
        InvalidArgument: It is not a tensor of the input's type.
    """
    shape, inner = [], value
    while type(inner) is list:
        shape.append(len(inner))
        inner = inner[0] if inner else None
    _descend(value, 0, shape, spec, left or iter(range(MAX_EXAMINED)))
    return shape


def _descend(
    value: Any, level: int, shape: list[int], spec: SignatureTensor, left: Iterator[int]
) -> None:
    if next(left, None) is None:
        raise InvalidArgument(
            f"input '{spec.name}' is not a rectangular array of type {type_name(spec.datatype)}"
        )
    if type(value) is list:
        if level >= len(shape):
            raise InvalidArgument(
                f"Encountered list at unexpected level: {level} expected < {len(shape)}"
            )
        if len(value) != shape[level]:
            raise InvalidArgument(
                f"Encountered list at unexpected size: {len(value)} at level: {level} expected "
                f"size: {shape[level]}"
            )
        for item in value:
            _descend(item, level + 1, shape, spec, left)
        return
    if level != len(shape):
        raise wrong(
            value,
            f"found at incorrect level: {level + 1} in the JSON DOM. Expected at level: "
            f"{len(shape)}",
        )
    datatype = spec.datatype
    fits = type(value) in TYPES.get(datatype, WHOLE)
    if fits and type(value) is int and NUMPY_DTYPES[datatype].kind in "iu":
        limits = np.iinfo(NUMPY_DTYPES[datatype])
        fits = limits.min <= value <= limits.max
    if not fits:
        raise wrong(
            value, f"Type: {json_name(value)} is not of expected type: {type_name(datatype)}"
        )
    if type(value) is dict:
        unescape(value)


def json_name(value: Any) -> str:
    """Return rapidjson's name of the value's type."""
    return str(value) if type(value) is bool else _JSON_NAMES[type(value)]


def wrong(value: Any, text: str) -> InvalidArgument:
    return InvalidArgument(f"JSON Value: {quoted(value)} {text}")


def quoted(value: Any) -> str:
    """Encode the beginning of ``value`` as JSON."""
    text = ""
    # The check for circular references would keep the value alive when the loop is left early.
    encoder = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=LongArray.head)
    for part in encoder.iterencode(value):
        text += part[:MAX_QUOTED]
        if len(text) > MAX_QUOTED:
            break
    return text[:MAX_QUOTED]
