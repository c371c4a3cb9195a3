"""``:classify`` and ``:regress`` over REST: JSON ↔ the messages of Classify and Regress.

Wire contract: tensorflow/serving ``util/json_tensor.cc``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gateway.errors import InvalidArgument
from gateway.protocols import tfserving_json
from gateway.protocols.tfserving_json_value import is_base64, json_name, unescape, wrong
from gateway.wire import json_text
from gateway.wire.proto import serving_pb2 as pb
from gateway.wire.proto import tensorflow_pb2

_KINDS = {"bytes_list": "bytes", "float_list": "float", "int64_list": "int64"}


def decode(body: bytes) -> tuple[pb.Input, str]:
    """The examples of a request, and its signature's name.

    Raises:
        InvalidArgument: in TensorFlow Serving's words.
    """
    document = tfserving_json.parse(body)
    message = pb.Input()
    context = "context" in document
    if context:
        _example(document["context"], message.example_list_with_context.context)
    if "examples" not in document:
        raise wrong(
            document, "When method is classify, key 'examples' is expected and was not found"
        )
    examples = document["examples"]
    if type(examples) is not list:
        raise wrong(document, "Expecting 'examples' value to be an list/array")
    if not examples:
        raise wrong(document, "'examples' value is an empty array")
    into = message.example_list_with_context if context else message.example_list
    for example in examples:
        _example(example, into.examples.add())
    return message, document.get("signature_name", "")


def _example(value: Any, example: tensorflow_pb2.Example) -> None:
    if type(value) is not dict:
        raise InvalidArgument(f"Example must be JSON object but got JSON {json_name(value)}")
    for name, content in value.items():
        feature = example.features.feature[name]
        for item in content if type(content) is list else [content]:
            _add(feature, name, item)


def _add(feature: tensorflow_pb2.Feature, name: str, value: Any) -> None:
    kind: str
    if type(value) in (bool, int):
        kind, value = "int64_list", int(value)
        if not -(2**63) <= value < 2**63:
            raise InvalidArgument(
                f"Feature: {name} has uint64_t element. Only int64_t is supported."
            )
    elif type(value) is float:
        kind = "float_list"
    elif type(value) is str:
        kind, value = "bytes_list", value.encode()
    elif type(value) is dict and is_base64(value):
        kind, value = "bytes_list", unescape(value)
    else:
        raise InvalidArgument(
            f"Feature: {name} has element with unexpected JSON type: {json_name(value)}"
        )
    held = feature.WhichOneof("kind")
    if held not in (None, kind):
        raise InvalidArgument(
            f"Unexpected element type in feature: {name} expecting type: {_KINDS[held]}"
        )
    getattr(feature, kind).value.append(value)


def encode_classification(result: pb.ClassificationResult) -> bytes:
    """``results``: for each example a list of ``[label, score]``."""
    return json_text.dumps(
        {
            "results": [
                [[c.label, json_text.numbers(np.array(c.score, np.float32))] for c in row.classes]
                for row in result.classifications
            ]
        }
    )


def encode_regression(result: pb.RegressionResult) -> bytes:
    """``results``: a value for each example."""
    values = np.array([regression.value for regression in result.regressions], np.float32)
    return json_text.dumps({"results": json_text.numbers(values)})
