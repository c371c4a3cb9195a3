"""JSON of ``:classify`` and ``:regress``, decoded to the messages of Classify and Regress.

Specification: TensorFlow Serving's ``util/json_tensor.cc``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols.tfserving import predict_json
from modelport.gateway.protocols.tfserving.json_errors import is_base64, json_name, unescape, wrong
from modelport.gateway.runtime import offload
from modelport.gateway.wire import json_text
from modelport.gateway.wire.long_array import LongArray
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.proto import tensorflow_pb2

#: Limits of examples and of their features together; more would take seconds to decode.
MAX_EXAMPLES = MAX_FEATURES = 100_000
#: Values of a feature that are added at once, of millions.
PIECE = 4096
#: Field of a ``Feature`` for each JSON type, and its name in messages.
_FIELDS = {
    bool: "int64_list",
    int: "int64_list",
    float: "float_list",
    str: "bytes_list",
    dict: "bytes_list",
}
_KINDS = {"bytes_list": "bytes", "float_list": "float", "int64_list": "int64"}


def decode(body: bytes) -> tuple[pb.Input, str]:
    """Decode the examples of a request, and its signature's name.

    Raises:
        InvalidArgument: The request is invalid, in TensorFlow Serving's words.
    """
    document = predict_json.parse(body, MAX_FEATURES)
    try:
        return _input(document), document.get("signature_name", "")
    finally:
        json_text.discard(document, len(body))


def _input(document: dict[str, Any]) -> pb.Input:
    message = pb.Input()
    context = "context" in document
    if context:
        _example(document["context"], message.example_list_with_context.context)
    if "examples" not in document:
        raise wrong(
            document, "When method is classify, key 'examples' is expected and was not found"
        )
    examples = document["examples"]
    if type(examples) is LongArray:
        raise InvalidArgument("Example must be JSON object")
    if type(examples) is not list:
        raise wrong(document, "Expecting 'examples' value to be an list/array")
    if not examples:
        raise wrong(document, "'examples' value is an empty array")
    if len(examples) > MAX_EXAMPLES:
        raise InvalidArgument(f"'examples' has {len(examples)} items, at most {MAX_EXAMPLES}")
    into = message.example_list_with_context if context else message.example_list
    for example in examples:
        _example(example, into.examples.add())
    return message


def _example(value: Any, example: tensorflow_pb2.Example) -> None:
    if type(value) is not dict:
        raise InvalidArgument(f"Example must be JSON object but got JSON {json_name(value)}")
    for name, content in value.items():
        feature = example.features.feature[name]
        for values in _pieces(content):
            _extend(feature, name, values)
            offload.checkpoint()


def _pieces(content: Any) -> Iterator[list[Any]]:
    if type(content) is LongArray:
        yield from content.pieces()
        return
    values = content if type(content) is list else [content]
    for start in range(0, len(values), PIECE):
        yield values[start : start + PIECE]


def _extend(feature: tensorflow_pb2.Feature, name: str, values: list[Any]) -> None:
    types = set(map(type, values))
    for unknown in types - _FIELDS.keys():  # null or an array
        raise _unexpected(name, unknown())
    kind = feature.WhichOneof("kind") or _FIELDS[type(values[0])]
    if {_FIELDS[each] for each in types} != {kind}:
        raise InvalidArgument(
            f"Unexpected element type in feature: {name} expecting type: {_KINDS[kind]}"
        )
    if types <= {bool, int}:
        if not -(2**63) <= min(values) <= max(values) < 2**63:
            raise InvalidArgument(
                f"Feature: {name} has uint64_t element. Only int64_t is supported."
            )
        feature.int64_list.value.extend(map(int, values) if bool in types else values)
    elif types == {float}:
        feature.float_list.value.extend(values)
    else:
        feature.bytes_list.value.extend(_bytes(name, value) for value in values)


def _bytes(name: str, value: Any) -> bytes:
    if type(value) is str:
        return value.encode()
    if not is_base64(value):
        raise _unexpected(name, value)
    return unescape(value)


def _unexpected(name: str, value: Any) -> InvalidArgument:
    return InvalidArgument(
        f"Feature: {name} has element with unexpected JSON type: {json_name(value)}"
    )
