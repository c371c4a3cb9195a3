"""Templates of JSON requests that differ only in their tensors' data.

Clients mostly send the same JSON with other numbers in it, or other binary data after it. The text
without the data is parsed once and then looked up. Other requests are left to ``json.decode``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import orjson

from modelport.gateway.errors import ModelportError
from modelport.gateway.protocols.oip import http_request
from modelport.gateway.protocols.oip.http_response import ResponseFormat
from modelport.gateway.protocols.oip.shared_memory import NO_SHARED_MEMORY
from modelport.gateway.types import Datatype, InferRequest, Parameter, Tensor
from modelport.gateway.wire import json_tensors, json_text, raw_tensors

#: Number of cached templates, and the maximum size of each part.
TEMPLATES = 1024
MAX_TEMPLATE_BYTES = 2048
#: Parsing longer data takes so long that a template saves nothing.
MAX_DATA_BYTES = 65536
_MAX_DEPTH = 8
#: Requests with an ``id`` have no template, because ids are unique.
_DATA, _ID = b'"data":', b'"id"'
#: Placeholder of the data; its random value cannot occur in a request.
_MARK = os.urandom(16).hex()
_MARKED = b'["%b"]' % _MARK.encode()
_BINARY_OUTPUT, _BINARY_SIZE = "binary_data_output", "binary_data_size"
#: Datatypes whose values must be checked one by one.
_CHECKED = (Datatype.BYTES, Datatype.BOOL)
_DOCUMENT_KEYS = {"inputs", "outputs", "parameters"}
_JSON_KEYS = {"name", "datatype", "shape", "data"}
_BINARY_KEYS = {"name", "datatype", "shape", "parameters"}


class _Template(NamedTuple):
    """A template. ``inputs`` are tuples of name, datatype, shape and binary data size."""

    inputs: tuple[tuple[str, Datatype, tuple[int, ...], int], ...]
    outputs: tuple[str, ...]
    classification: Mapping[str, int]
    parameters: Mapping[str, Parameter]
    binary: bool
    by_output: dict[str, bool]

    def request(
        self, model_name: str, model_version: int, tensors: list[Tensor]
    ) -> tuple[InferRequest, ResponseFormat]:
        parameters = dict(self.parameters)
        request = InferRequest(
            model_name, tensors, self.outputs, model_version, "", parameters, self.classification
        )
        return request, ResponseFormat(self.binary, self.by_output)


def decode(
    body: bytes, header_length: int, model_name: str, model_version: int
) -> tuple[InferRequest, ResponseFormat] | None:
    """Decode a request with a template, or return None.

    Raises:
        InvalidArgument: The data does not fit the datatype and shape of its input.
    """
    if header_length != len(body):
        return _binary_request(body, header_length, model_name, model_version)
    at = body.find(_DATA, 0, MAX_TEMPLATE_BYTES)
    if at < 0:
        return None
    start = at + len(_DATA)
    if body[start : start + 1] == b" ":
        start += 1
    depth = 0
    while depth <= _MAX_DEPTH and body[start + depth : start + depth + 1] == b"[":
        depth += 1
    end = body.find(b"]" * depth, start, start + MAX_DATA_BYTES) + depth
    if not 0 < depth <= _MAX_DEPTH or end < start or header_length - end > MAX_TEMPLATE_BYTES:
        return None
    before, after = body[:start], body[end:]
    if before.find(_ID) >= 0 or after.find(_ID) >= 0:  # ``in`` is slower
        return None
    head = _json_template(before, after)
    if head is None:
        return None
    try:
        data = orjson.loads(body[start:end])
    except orjson.JSONDecodeError:
        return None
    name, datatype, shape, _ = head.inputs[0]
    tensor = Tensor(name, datatype, json_tensors.decode(name, datatype, shape, data))
    return head.request(model_name, model_version, [tensor])


def glance(
    body: bytes, header_length: int, model_name: str, model_version: int
) -> tuple[InferRequest, ResponseFormat] | None:
    """Decode a large binary request whose tensors are views of ``body``, or return None."""
    head = _binary_template(body[:header_length]) if header_length <= MAX_TEMPLATE_BYTES else None
    if head is None or any(datatype in _CHECKED for _, datatype, *_ in head.inputs):
        return None
    return _binary_request(body, header_length, model_name, model_version)


def _binary_request(
    body: bytes, header_length: int, model_name: str, model_version: int
) -> tuple[InferRequest, ResponseFormat] | None:
    if header_length > MAX_TEMPLATE_BYTES:
        return None
    text = body[:header_length]
    head = _binary_template(text) if text.find(_ID) < 0 else None
    if head is None or header_length + sum(size for *_, size in head.inputs) != len(body):
        return None
    view, offset, tensors = memoryview(body), header_length, []
    for name, datatype, shape, size in head.inputs:
        part = view[offset : offset + size]
        tensors.append(
            Tensor(name, datatype, raw_tensors.decode(name, datatype, shape, part, model_name))
        )
        offset += size
    return head.request(model_name, model_version, tensors)


@lru_cache(TEMPLATES)
def _json_template(before: bytes, after: bytes) -> _Template | None:
    """Make the template of JSON with the data of one input between ``before`` and ``after``."""
    return _template(before + _MARKED + after, _JSON_KEYS, set())


@lru_cache(TEMPLATES)
def _binary_template(text: bytes) -> _Template | None:
    """Make the template of JSON ``text`` with binary data after it."""
    return _template(text, _BINARY_KEYS, {_BINARY_SIZE})


def _template(text: bytes, keys: set[str], parameter_keys: set[str]) -> _Template | None:
    """Make a template if each input has these ``keys``, and parameters with ``parameter_keys``."""
    request, form, inputs, held = InferRequest("", []), ResponseFormat(), [], [_MARK]
    try:
        document = json_text.loads(text)
        if type(document) is not dict or not document.keys() <= _DOCUMENT_KEYS:
            return None
        parameters, items = http_request.read_parameters(document), document.get("inputs")
        if type(items) is not list or not items or not parameters.keys() <= {_BINARY_OUTPUT}:
            return None
        for item in items:
            if type(item) is not dict or item.keys() != keys or item.get("data", held) != held:
                return None
            given, name, shape = http_request.read_parameters(item), item["name"], item["shape"]
            if type(name) is not str or type(shape) is not list or given.keys() != parameter_keys:
                return None
            datatype = raw_tensors.parse_datatype(name, item["datatype"])
            size = int(given.get(_BINARY_SIZE, 0))
            inputs.append((name, datatype, raw_tensors.parse_shape(name, shape), size))
        if "outputs" in document:
            http_request.read_outputs(document["outputs"], request, form, NO_SHARED_MEMORY)
    except ModelportError:
        return None
    return _Template(
        tuple(inputs),
        request.outputs,
        request.classification,
        parameters,
        bool(parameters.get(_BINARY_OUTPUT)),
        form.by_output,
    )
