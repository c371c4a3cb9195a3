"""Texts in JSON requests: detection, and the form of Hugging Face's inference API.

    {"inputs": "hello", "parameters": {...}}

``inputs`` is a text, an object (``text`` and ``text_pair``, ``question`` and ``context``,
``source_sentence`` and ``sentences``), or a list of them. Options may also stand beside ``inputs``,
as in Text Embeddings Inference. The response is the one that ``huggingface_hub`` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.text import answers
from modelport.gateway.inference.text.tasks import CANDIDATES, PAIR, TEXT, TextEmbedding
from modelport.gateway.inference.text.text_infer import TEXT_SIGNATURE, TextInterface
from modelport.gateway.repository.text_settings import TextTask
from modelport.gateway.types import Datatype, InferRequest, InferResponse, Parameter, Tensor
from modelport.gateway.wire import json_text, json_writer, raw_tensors
from modelport.gateway.wire.raw_tensors import Buffer

Encode = Callable[[InferResponse], Buffer]
_INPUTS, _PARAMETERS = "inputs", "parameters"
_SOURCE, _SENTENCES = "source_sentence", "sentences"
#: A member of the hosted API without effect: no answer is cached, and every model is loaded.
_WITHOUT_EFFECT = "options"


def are_texts(value: Any, names: frozenset[str]) -> bool:
    """Whether a JSON value, or the first of its elements, is a text or has inputs of ``names``."""
    while type(value) is list and value:
        value = value[0]
    if type(value) is dict:
        return not names.isdisjoint(value) or value.keys() == {"b64"}
    return type(value) is str


def is_request(document: Any) -> bool:
    """Whether an object with ``inputs`` has this form, and not the Open Inference Protocol's."""
    value = document[_INPUTS]
    if type(value) is list and value:
        value = value[0]
        return type(value) is not dict or "name" not in value
    return type(value) is not list


def decode(
    document: Mapping[str, Any], text: TextInterface, model: str, version: int = 0
) -> tuple[InferRequest, Encode]:
    """Decode a request; return it and the encoder of its response.

    Raises:
        InvalidArgument: the request is invalid; the message names the member.
    """
    options = _options(document)
    value = document[_INPUTS]
    single = type(value) is not list
    rows = [value] if single else value
    if not rows:
        raise InvalidArgument("'inputs' has no text")
    if single and type(value) is dict and _SOURCE in value:
        return _similarity(value, text, options, model, version)
    labels = options.pop(CANDIDATES.name, None)
    columns = _columns(rows, text)
    if labels is not None:
        columns[CANDIDATES.name] = _labels(labels)
    request = make(columns, options, model, version)
    return request, partial(_encode, text.settings.task, single, labels is not None)


def make(
    columns: Mapping[str, Sequence[str]], options: Mapping[str, Any], model: str, version: int = 0
) -> InferRequest:
    """Make a request of texts by input.

    Raises:
        InvalidArgument: a text is no string, or an option no plain value.
    """
    for name, option in options.items():
        if type(option) not in (bool, int, float, str):
            raise InvalidArgument(f"parameter '{name[:64]}' must be a number, a string or a bool")
    tensors = [Tensor(name, Datatype.BYTES, _array(name, each)) for name, each in columns.items()]
    parameters: Mapping[str, Parameter] = dict(options)
    return InferRequest(
        model, tensors, model_version=version, parameters=parameters, signature=TEXT_SIGNATURE
    )


def _options(document: Mapping[str, Any]) -> dict[str, Any]:
    given = document.get(_PARAMETERS)
    if given is not None and type(given) is not dict:
        raise InvalidArgument("'parameters' must be an object")
    own = (_INPUTS, _PARAMETERS, _WITHOUT_EFFECT)
    beside = {name: value for name, value in document.items() if name not in own}
    return {name: value for name, value in {**beside, **(given or {})}.items() if value is not None}


def _columns(rows: Sequence[Any], text: TextInterface) -> dict[str, Sequence[str]]:
    """The texts by input."""
    if all(type(row) is str for row in rows):
        (first, *others) = (spec.name for spec in text.signature.inputs if not spec.optional)
        if others:
            raise InvalidArgument(f"'inputs' must be an object with {first} and {others[0]}")
        return {first: rows}
    known = text.names - {CANDIDATES.name}
    if not all(type(row) is dict and row.keys() == rows[0].keys() <= known for row in rows):
        raise InvalidArgument(
            f"'inputs' must be texts, or objects with {' and '.join(sorted(known, reverse=True))}"
        )
    return {name: [row[name] for row in rows] for name in rows[0]}


def _labels(value: Any) -> list[str]:
    """Candidate labels: a list, or one string with commas."""
    if type(value) is str:
        return [label.strip() for label in value.split(",") if label.strip()]
    if type(value) is not list or not value:
        raise InvalidArgument("parameter 'candidate_labels' must be a list of strings")
    return value


def _array(name: str, texts: Sequence[Any]) -> Any:
    items = []
    for text in texts:
        if type(text) is not str:
            raise InvalidArgument(f"'{name}' must be strings")
        items.append(text.encode("utf-8", "replace"))
    return raw_tensors.object_array(items, (len(items),))


def _similarity(
    value: Mapping[str, Any],
    text: TextInterface,
    options: Mapping[str, Any],
    model: str,
    version: int,
) -> tuple[InferRequest, Encode]:
    """A sentence and others: the cosine of the angle between their vectors."""
    sentences = value.get(_SENTENCES)
    if text.settings.task is not TextTask.EMBEDDING or type(sentences) is not list:
        raise InvalidArgument(
            f"'{_SOURCE}' and '{_SENTENCES}', a list, are for a model of embeddings"
        )
    columns = {TEXT.name: [value[_SOURCE], *sentences]}
    request = make(columns, {**options, "normalize": True}, model, version)

    def encode(response: InferResponse) -> Buffer:
        first, others = response.outputs[0].data[0], response.outputs[0].data[1:]
        return json_text.dumps((others @ first).tolist())

    return request, encode


def _encode(task: TextTask, single: bool, candidates: bool, response: InferResponse) -> Buffer:
    if task is TextTask.EMBEDDING:
        return json_writer.dumps(vectors(response))
    rows: list[Any] = answers.items(response.outputs)
    if task is TextTask.QUESTIONS:
        rows = [row[0] if len(row) == 1 else row for row in rows]
    nested = not single or (task is TextTask.CLASSIFICATION and not candidates)
    return json_text.dumps(rows if nested else rows[0])


def vectors(response: InferResponse) -> np.ndarray[Any, Any]:
    """The embeddings in a response."""
    (found,) = (tensor.data for tensor in response.outputs if tensor.name == TextEmbedding.NAME)
    return found


def pairs(first: str, others: Sequence[str]) -> dict[str, Sequence[str]]:
    """Inputs that pair one text with others."""
    return {TEXT.name: [first] * len(others), PAIR.name: others}
