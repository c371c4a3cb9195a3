"""OpenAI's API for embeddings: ``/v1/embeddings``; TensorFlow Serving's dialect lists the models.

Specification: OpenAI's API reference. Generation is refused by name; a route for it is one more
entry of the table.
"""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

import numpy as np
import orjson

from modelport.gateway.errors import (
    Code,
    InvalidArgument,
    ModelportError,
    QuotaExceeded,
    Unsupported,
)
from modelport.gateway.inference.text.text_infer import TOKENS
from modelport.gateway.protocols import openapi, text_inputs
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse
from modelport.gateway.protocols.texts.text_calls import (
    Encode,
    Members,
    TextCall,
    TextDialect,
    TextModelNotFound,
    embeds,
    require_known,
)
from modelport.gateway.types import InferRequest, InferResponse
from modelport.gateway.wire import json_writer
from modelport.gateway.wire.raw_tensors import Buffer

_EMBEDDINGS = "/v1/embeddings"
_GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_MEMBERS = ("input", "model", "encoding_format", "dimensions", "user")
_INVALID = "invalid_request_error"
#: Status, type and code of errors.
_ERRORS: dict[Code, tuple[int, str, str | None]] = {
    Code.INVALID_ARGUMENT: (400, _INVALID, None),
    Code.ALREADY_EXISTS: (400, _INVALID, None),
    Code.CANCELLED: (400, _INVALID, None),
    Code.UNKNOWN: (400, _INVALID, None),
    Code.UNAUTHENTICATED: (401, _INVALID, "invalid_api_key"),
    Code.PERMISSION_DENIED: (403, _INVALID, "permission_denied"),
    Code.NOT_FOUND: (404, _INVALID, None),
    Code.UNSUPPORTED: (404, _INVALID, None),
    Code.QUOTA_EXCEEDED: (429, "requests", "rate_limit_exceeded"),
    Code.INTERNAL: (500, "server_error", None),
    Code.UNAVAILABLE: (503, "server_error", None),
}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["input", "model"],
                    "properties": {
                        "input": {"description": "a text, or an array of texts"},
                        "model": {"type": "string"},
                        "encoding_format": {"enum": ["float", "base64"]},
                        "dimensions": {"type": "integer"},
                        "user": {"type": "string"},
                    },
                }
            }
        },
    }
}


class OpenAiHttp(TextDialect):
    """The routes of OpenAI's API."""

    segments = frozenset({"v1"})
    statuses = frozenset(status for status, *_ in _ERRORS.values())
    error = openapi.error_schema(error="object")

    def __init__(self, host: DialectHost) -> None:
        refused = "Refused: this server generates no text."
        calls = [
            TextCall(_EMBEDDINGS, self._embeddings, "Vectors of texts, as OpenAI's API.", _BODY),
            *(TextCall(path, self._generation, refused) for path in _GENERATION),
        ]
        super().__init__(host, "OpenAI", calls)

    def failure(self, request: HttpRequest, error: ModelportError) -> HttpResponse:
        status, kind, code = _ERRORS[error.code]
        if isinstance(error, TextModelNotFound):
            code = "model_not_found"
        if isinstance(error, QuotaExceeded):
            kind = error.unit
        body = {"message": str(error), "type": kind, "param": None, "code": code}
        return HttpResponse(status, orjson.dumps({"error": body}))

    def _embeddings(self, members: Members) -> tuple[InferRequest, Encode]:
        if members.get("stream"):
            raise InvalidArgument("embeddings are not streamed; omit 'stream'")
        require_known(members, _MEMBERS)
        if "model" not in members:
            raise InvalidArgument("you must provide a model parameter")
        served, _ = self.model(members["model"], embeds, "embeddings")
        form = members.get("encoding_format") or "float"
        if form not in ("float", "base64"):
            raise InvalidArgument("'encoding_format' must be float or base64")
        texts = _texts(members.get("input"))
        options = {k: members[k] for k in ("dimensions",) if members.get(k) is not None}
        request = text_inputs.make({"text": texts}, options, served.name)
        return request, partial(_encode, served.name, form == "base64")

    def _generation(self, members: Members) -> tuple[InferRequest, Encode]:
        streamed = "streamed or not, " if members.get("stream") else ""
        raise Unsupported(
            f"this server generates no text, {streamed}and serves {_EMBEDDINGS} of this API"
        )


def _texts(value: Any) -> list[str]:
    texts = [value] if type(value) is str else value
    if type(texts) is list and texts and {*map(type, texts)} == {str}:
        return texts
    if type(texts) is list and texts and {*map(type, texts)} <= {int, list}:
        raise InvalidArgument(
            "'input' has token ids of another model's tokenizer; send texts (LangChain: "
            "check_embedding_ctx_length=False)"
        )
    raise InvalidArgument("'input' must be a string, or an array of at least one string")


def _encode(model: str, as_base64: bool, response: InferResponse) -> Buffer:
    vectors = text_inputs.vectors(response)
    data: list[dict[str, Any]] = []
    for index, vector in enumerate(vectors):
        value: Any = vector
        if as_base64:
            value = base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": value})
    tokens = int(response.parameters[TOKENS])
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_writer.dumps({"object": "list", "data": data, "model": model, "usage": usage})
