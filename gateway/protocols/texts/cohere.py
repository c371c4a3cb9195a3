"""Cohere's API for reranking: ``/v1/rerank`` and ``/v2/rerank``."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

import orjson

from modelport.gateway.errors import InvalidArgument, ModelportError
from modelport.gateway.protocols import openapi
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse
from modelport.gateway.protocols.oip.http_errors import STATUS
from modelport.gateway.protocols.texts.text_calls import (
    Encode,
    Members,
    TextCall,
    TextDialect,
    flag,
    ranked,
    require_known,
)
from modelport.gateway.types import InferRequest, InferResponse
from modelport.gateway.wire import json_text
from modelport.gateway.wire.raw_tensors import Buffer

_PATHS = ("/v1/rerank", "/v2/rerank")
_MEMBERS = ("model", "query", "documents", "top_n", "return_documents")


class CohereHttp(TextDialect):
    """The routes of Cohere's API."""

    segments = frozenset({"v1", "v2"})
    statuses = frozenset(STATUS.values())
    error = openapi.error_schema(message="string")

    def __init__(self, host: DialectHost) -> None:
        told = "The order of documents for a query, as Cohere's API."
        super().__init__(host, "Cohere", [TextCall(path, self._rerank, told) for path in _PATHS])

    def failure(self, request: HttpRequest, error: ModelportError) -> HttpResponse:
        return HttpResponse(STATUS[error.code], orjson.dumps({"message": str(error)}))

    def _rerank(self, members: Members) -> tuple[InferRequest, Encode]:
        require_known(members, _MEMBERS)
        documents, count = members.get("documents"), members.get("top_n")
        if type(documents) is not list:
            raise InvalidArgument("'documents' must be a list of texts")
        texts = [_text(each) for each in documents]
        if count is not None and (type(count) is not int or count < 1):
            raise InvalidArgument("'top_n' must be an integer above 0")
        request = self.ranking(self.reranker(members), members, texts, False, True)
        shown = texts if flag(members, "return_documents") else None
        return request, partial(_results, count, shown)


def _text(document: Any) -> Any:
    """A document's text; version 1 of the API also takes an object with it."""
    return document.get("text") if type(document) is dict else document


def _results(count: int | None, texts: list[str] | None, response: InferResponse) -> Buffer:
    results = []
    for index, score in ranked(response)[:count]:
        shown = {} if texts is None else {"document": {"text": texts[index]}}
        results.append({"index": index, "relevance_score": score, **shown})
    units = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    return json_text.dumps({"id": str(uuid.uuid4()), "results": results, "meta": units})
