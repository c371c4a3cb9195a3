"""Plain JSON: tensors without datatype and shape, as in TorchServe's envelopes.

    {"instances": [element, ...]}   one item for each batch element (TensorFlow Serving's rows)
    {"data": value}                 the whole input, or an object of inputs by name
    value                           the whole of a model's single input

A whole input may lack the batch dimension; the response then lacks it too. An element of a model
with several inputs is an object by input name. ``{"b64": "..."}`` is an element of a BYTES input,
or an image. The response to an object is ``{"predictions": ...}``, otherwise a bare value: the
values of a single output, or for each element an object by output name.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.image_decoding import Decoder
from modelport.gateway.runtime import offload
from modelport.gateway.types import (
    Array,
    Datatype,
    InferResponse,
    ModelSignature,
    Tensor,
    TensorSpec,
)
from modelport.gateway.wire import json_tensors, json_writer, raw_tensors
from modelport.gateway.wire.long_array import LongArray
from modelport.gateway.wire.raw_tensors import Buffer

BASE64_KEY = "b64"


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """Format of the response, which follows the request.

    Attributes:
        wrapped: In an object.
        batched: One item for each batch element.
        single: The only batch element, without a list.
        listed: A list of one item, from a model that does not batch.
    """

    wrapped: bool
    batched: bool = False
    single: bool = False
    listed: bool = False


def decode(
    document: Any, signature: ModelSignature, decoders: Mapping[str, Decoder]
) -> tuple[list[Tensor], ResponseForm]:
    """Decode the inputs; ``decoders`` are those of image inputs, by name.

    Raises:
        InvalidArgument: A member or an input is invalid; the message names it.
    """
    batches = signature.max_batch_size > 0
    wrapped = type(document) is dict
    if wrapped and "instances" in document:
        columns = _columns(document["instances"], signature, batches)
        return _tensors(columns, signature, decoders), ResponseForm(
            True, batches, listed=not batches
        )
    if wrapped and "data" not in document:
        raise InvalidArgument("the JSON object must have 'inputs', 'instances' or 'data'")
    value = document["data"] if wrapped else document
    columns = value if _by_name(value) else _single(value, signature)
    tensors = _tensors(columns, signature, decoders)
    if not batches:
        return tensors, ResponseForm(wrapped)
    ranks = {spec.name: len(spec.dims) for spec in signature.inputs}
    single = {tensor.data.ndim == ranks[tensor.name] for tensor in tensors}
    if single == {True}:
        for tensor in tensors:
            tensor.data = tensor.data[np.newaxis]
        return tensors, ResponseForm(wrapped, single=True)
    return tensors, ResponseForm(wrapped, batched=True)


def _by_name(value: Any) -> bool:
    return type(value) is dict and not _is_base64(value)


def _single(value: Any, signature: ModelSignature) -> dict[str, Any]:
    required = [spec.name for spec in signature.inputs if not spec.optional]
    if len(required) != 1 and len(signature.inputs) != 1:
        names = ", ".join(f"'{spec.name}'" for spec in signature.inputs)
        raise InvalidArgument(f"the model has the inputs {names}: give an object with each by name")
    return {(required or [signature.inputs[0].name])[0]: value}


def _columns(rows: Any, signature: ModelSignature, batches: bool) -> dict[str, Any]:
    """Convert elements to inputs with a batch dimension."""
    is_long = type(rows) is LongArray
    if not is_long and (type(rows) is not list or not rows):
        raise InvalidArgument("'instances' must be an array with at least one element")
    if not batches and (is_long or len(rows) != 1):
        raise InvalidArgument("the model takes no batch: 'instances' must have one element")
    if is_long:
        return _single(rows, signature)
    named = [_by_name(row) for row in rows]
    if not any(named):
        columns = _single(rows, signature)
    elif all(named) and all(row.keys() == rows[0].keys() for row in rows):
        columns = {name: [row[name] for row in rows] for name in rows[0]}
    else:
        raise InvalidArgument("'instances' must be objects with the same inputs, or values")
    return columns if batches else {name: column[0] for name, column in columns.items()}


def _tensors(
    columns: Mapping[str, Any], signature: ModelSignature, decoders: Mapping[str, Decoder]
) -> list[Tensor]:
    specs = {spec.name: spec for spec in signature.inputs}
    tensors = []
    for name, value in columns.items():
        if name not in specs:
            raise InvalidArgument(
                f"unexpected input '{name}'; the inputs are "
                + ", ".join(f"'{spec.name}'" for spec in signature.inputs)
            )
        data = _array(specs[name], value, decoders, max(1, signature.max_batch_size))
        tensors.append(Tensor(name, specs[name].datatype, data))
    return tensors


def _array(spec: TensorSpec, value: Any, decoders: Mapping[str, Decoder], most: int) -> Array:
    """Decode an input, with at most ``most`` images, because each takes milliseconds."""
    if type(value) is LongArray:
        return _numbers(spec, raw_tensors.parse_shape(spec.name, value.shape), value)
    shape, flat = _flatten(spec.name, value)
    if spec.name in decoders and flat and all(map(_is_base64, flat)):
        if len(flat) > most:
            raise InvalidArgument(f"input '{spec.name}' has {len(flat)} images, at most {most}")
        images = []
        for item in flat:
            offload.checkpoint()
            images.append(decoders[spec.name](_bytes(spec.name, item)))
        first = images[0].shape
        if any(image.shape != first for image in images):
            raise InvalidArgument(f"the images of input '{spec.name}' have different sizes")
        return np.stack(images).reshape(*shape, *first)
    if spec.datatype is Datatype.BYTES and any(map(_is_base64, flat)):
        items = [_bytes(spec.name, x) if _is_base64(x) else _text(spec.name, x) for x in flat]
        return raw_tensors.object_array(items, shape)
    return _numbers(spec, shape, flat)


def _numbers(spec: TensorSpec, shape: tuple[int, ...], values: Any) -> Array:
    if spec.datatype is not Datatype.FP16:
        return json_tensors.decode(spec.name, spec.datatype, shape, values)
    with np.errstate(over="ignore"):  # ``json_tensors`` does not support FP16
        return json_tensors.decode(spec.name, Datatype.FP32, shape, values).astype(np.float16)


def _flatten(name: str, value: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape of nested lists, and their values as a flat list."""
    shape: list[int] = []
    level = [value]
    while level and set(map(type, level)) == {list}:
        sizes = set(map(len, level))
        if len(sizes) != 1:
            raise InvalidArgument(f"the lists of input '{name}' have different lengths")
        shape.append(sizes.pop())
        level = list(itertools.chain.from_iterable(level))
    return raw_tensors.parse_shape(name, shape), level


def _is_base64(item: Any) -> bool:
    return type(item) is dict and item.keys() == {BASE64_KEY}


def _text(name: str, item: Any) -> bytes:
    if type(item) is not str:
        raise InvalidArgument(f"input '{name}' is BYTES: its values must be strings")
    try:
        return item.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"a string of input '{name}' is not valid Unicode") from None


def _bytes(name: str, item: Any) -> bytes:
    try:
        return base64.b64decode(item[BASE64_KEY], validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise InvalidArgument(f"a 'b64' of input '{name}' is not base64") from None


def encode(response: InferResponse, form: ResponseForm) -> Buffer:
    """Encode ``response`` in the format of its request.

    Raises:
        InvalidArgument: JSON cannot represent an output.
    """
    columns = {}
    for tensor in response.outputs:
        data = _values(tensor)
        columns[tensor.name] = data[0, ...] if form.single else data
    value: Any = columns
    if len(columns) == 1:
        (value,) = columns.values()
    elif form.batched:
        value = json_writer.Rows(columns)
    value = [value] if form.listed else value
    return json_writer.dumps({"predictions": value} if form.wrapped else value)


def _values(tensor: Tensor) -> Array:
    if tensor.datatype is Datatype.BF16:
        raise InvalidArgument(f"output '{tensor.name}' is BF16; ask for it as bytes, with 'inputs'")
    data = tensor.data
    if tensor.datatype is Datatype.BYTES:
        return json_tensors.converted(data, _written)
    return data.astype(np.float64) if data.dtype.kind == "f" else data


def _written(item: bytes) -> Any:
    try:
        return item.decode()
    except UnicodeDecodeError:
        return {BASE64_KEY: base64.b64encode(item).decode()}
