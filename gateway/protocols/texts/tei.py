"""Text Embeddings Inference's API: ``/embed``, ``/predict``, ``/rerank``, and ``/`` for them all.

Specification: the OpenAPI document of huggingface/text-embeddings-inference. The server there has
one model; here a member ``model`` names it where several would fit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson

from modelport.gateway.errors import Code, InvalidArgument, ModelportError
from modelport.gateway.protocols import openapi, text_inputs
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse
from modelport.gateway.protocols.texts.text_calls import (
    Encode,
    Members,
    NoJsonObject,
    TextCall,
    TextDialect,
    embeds,
    flag,
    ranked,
    require_known,
)
from modelport.gateway.repository.text_settings import TextSettings, TextTask
from modelport.gateway.types import InferRequest, InferResponse
from modelport.gateway.wire import json_text
from modelport.gateway.wire.raw_tensors import Buffer

_STATUS = {
    Code.INVALID_ARGUMENT: (413, "Validation"),
    Code.ALREADY_EXISTS: (413, "Validation"),
    Code.CANCELLED: (413, "Validation"),
    Code.UNKNOWN: (413, "Validation"),
    Code.UNAUTHENTICATED: (401, "Unauthenticated"),
    Code.PERMISSION_DENIED: (403, "PermissionDenied"),
    Code.NOT_FOUND: (404, "Validation"),
    Code.UNSUPPORTED: (424, "Backend"),
    Code.INTERNAL: (424, "Backend"),
    Code.QUOTA_EXCEEDED: (429, "Overloaded"),
    Code.UNAVAILABLE: (503, "Unhealthy"),
}
MALFORMED = 400
_MODEL, _INPUTS, _RAW, _TRUNCATE = "model", "inputs", "raw_scores", "truncate"
_RERANK = (_MODEL, "query", "texts", _RAW, "return_text", _TRUNCATE)


class TeiHttp(TextDialect):
    """The routes of Text Embeddings Inference."""

    segments = frozenset({"embed", "predict", "rerank", ""})
    statuses = frozenset({MALFORMED, *(status for status, _ in _STATUS.values())})
    error = openapi.error_schema(error="string", error_type="string")

    def __init__(self, host: DialectHost) -> None:
        told = "as Text Embeddings Inference."
        calls = [
            TextCall("/embed", self._embed, f"Vectors of texts, {told}"),
            TextCall("/predict", self._predict, f"Classes of texts, {told}"),
            TextCall("/rerank", self._rerank, f"The order of texts for a query, {told}"),
            TextCall("/", self._any, "The only text model, as Hugging Face's inference API."),
        ]
        super().__init__(host, "Text Embeddings Inference", calls)

    def failure(self, request: HttpRequest, error: ModelportError) -> HttpResponse:
        status, kind = _STATUS[error.code]
        if isinstance(error, NoJsonObject):  # which Text Embeddings Inference finds while it reads
            status = MALFORMED
        return HttpResponse(status, orjson.dumps({"error": str(error), "error_type": kind}))

    def _embed(self, members: Members) -> tuple[InferRequest, Encode]:
        served, text = self.model(members.get(_MODEL), embeds, "embeddings")
        _require_inputs(members)
        asked = {"normalize": True, **_without(members, _MODEL)}
        return text_inputs.decode(asked, text, served.name)

    def _predict(self, members: Members) -> tuple[InferRequest, Encode]:
        served, text = self.model(members.get(_MODEL), _classifies, "prediction")
        _require_inputs(members)
        require_known(members, (_MODEL, _INPUTS, _RAW, _TRUNCATE))
        single, inputs = _sequences(members[_INPUTS])
        asked = {_INPUTS: inputs, _TRUNCATE: members.get(_TRUNCATE)}
        if flag(members, _RAW):
            asked["function_to_apply"] = "none"
        request, encode = text_inputs.decode(asked, text, served.name)
        return request, partial(_first, encode) if single else encode

    def _rerank(self, members: Members) -> tuple[InferRequest, Encode]:
        # First, as in the other routes: nothing is valid without a model.
        served = self.reranker(members)
        require_known(members, _RERANK)
        texts, truncate = members.get("texts"), members.get(_TRUNCATE)
        request = self.ranking(served, members, texts, flag(members, _RAW), truncate)
        shown = texts if flag(members, "return_text") else None
        return request, partial(_ranks, shown)

    def _any(self, members: Members) -> tuple[InferRequest, Encode]:
        served, text = self.model(members.get(_MODEL), lambda settings: True, "texts")
        _require_inputs(members)
        return text_inputs.decode(_without(members, _MODEL), text, served.name)


def _classifies(settings: TextSettings) -> bool:
    return settings.task is TextTask.CLASSIFICATION


def _without(members: Members, name: str) -> dict[str, Any]:
    return {key: value for key, value in members.items() if key != name}


def _require_inputs(members: Members) -> None:
    if members.get(_INPUTS) is None:
        raise InvalidArgument("'inputs' is missing; it has the texts")


def _sequences(value: Any) -> tuple[bool, list[Any]]:
    """The texts and pairs of ``inputs``, and whether there is just one, not in a list."""
    if type(value) is str:
        return True, [value]
    if type(value) is not list or not value:
        raise InvalidArgument("'inputs' must be a text, a pair of texts, or a list of them")
    if {*map(type, value)} == {str} and len(value) == 2:
        return True, [_sequence(value)]
    found = [_sequence(each) for each in value]
    if len({*map(type, found)}) > 1:
        raise InvalidArgument("'inputs' must be texts alone, or pairs of texts alone")
    return False, found


def _sequence(value: Any) -> Any:
    """A text, or an object with a pair."""
    if type(value) is str:
        return value
    if type(value) is not list or len(value) not in (1, 2) or {*map(type, value)} != {str}:
        raise InvalidArgument("an element of 'inputs' must be a text, or one or two in a list")
    return value[0] if len(value) == 1 else {"text": value[0], "text_pair": value[1]}


def _first(encode: Encode, response: InferResponse) -> Buffer:
    """The answer to the only text, without a list around it."""
    return bytes(encode(response))[1:-1]


def _ranks(texts: list[str] | None, response: InferResponse) -> Buffer:
    found = []
    for index, score in ranked(response):
        shown = {} if texts is None else {"text": texts[index]}
        found.append({"index": index, **shown, "score": score})
    return json_text.dumps(found)
