"""Calls of text models, shared by their dialects: the model, the request's JSON, the answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import InvalidArgument, NotFound
from modelport.gateway.inference.text.text_infer import TextInterface
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.protocols import request_body, response_encoding, text_inputs
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http import DialectRoute, HttpDialect
from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse
from modelport.gateway.protocols.oip.metadata import ready_models
from modelport.gateway.protocols.oip.schema import ANY_BODY
from modelport.gateway.repository.text_settings import TextSettings, TextTask
from modelport.gateway.runtime import offload
from modelport.gateway.types import Deadline, InferRequest, InferResponse, Tensor, finished
from modelport.gateway.wire import json_text
from modelport.gateway.wire.deadline_headers import http_deadline
from modelport.gateway.wire.raw_tensors import Buffer

#: Names of members that a request has.
Members = Mapping[str, Any]
Encode = Callable[[InferResponse], Buffer]
#: What a call makes of a request's members: the inference, and the encoder of its response.
Decode = Callable[[Members], tuple[InferRequest, Encode]]
_MAX_NAME = 128


class TextModelNotFound(NotFound):
    """The named model is not served, or has no text interface."""


class TextCall(NamedTuple):
    """A POST route of a dialect, and its documentation; ``body`` is the schema of its request."""

    path: str
    decode: Decode
    description: str
    body: dict[str, Any] = ANY_BODY


class RerankedText(NamedTuple):
    """A text of a request, by its place there, and its score."""

    place: int
    score: float


class TextDialect(HttpDialect):
    """A dialect of text models.

    Args:
        tag: its name in the documentation.
        calls: its routes.
    """

    def __init__(self, host: DialectHost, tag: str, calls: Sequence[TextCall]) -> None:
        self._host = host
        self.table = [
            DialectRoute(
                "POST",
                call.path,
                Operation.INFER,
                partial(self._serve, call.decode),
                {
                    "name": call.path,
                    "description": call.description,
                    "tags": [tag],
                    "openapi_extra": call.body,
                },
            )
            for call in calls
        ]

    async def _serve(self, decode: Decode, request: HttpRequest) -> HttpResponse:
        deadline = http_deadline(request.fields)
        body = await request_body.read(request, self._host.max_input_bytes, deadline)
        work = partial(_decoded, decode, body)
        large = len(body) > offload.INLINE_BYTES
        asked, encode = await offload.run(work, deadline) if large else work()
        asked.trace = request.trace
        response = await finished(self._host.service.infer(asked, deadline))
        return await self._response(partial(encode, response), response.outputs, deadline)

    async def _response(
        self, write: Callable[[], Buffer], outputs: Sequence[Tensor], deadline: Deadline
    ) -> HttpResponse:
        return HttpResponse(200, await response_encoding.encode(write, outputs, deadline))

    def model(
        self, stated: Any, fits: Callable[[TextSettings], bool], purpose: str
    ) -> tuple[ServedVersion, TextInterface]:
        """The model that a request names, or the only one for its purpose.

        Raises:
            TextModelNotFound: there is no such model, or it is for another purpose, or there is
                none for this one.
            InvalidArgument: it names none, and there are several.
        """
        if stated is not None and (type(stated) is not str or not stated):
            raise InvalidArgument("'model' must be the name of a model")
        names = ready_models(self._host.manager) if stated is None else [stated]
        served = {name: self._host.manager.find(name) for name in names}
        fitting = [
            (each, each.text)
            for each in served.values()
            if each is not None and each.text is not None and fits(each.text.settings)
        ]
        if len(fitting) == 1:
            return fitting[0]
        if stated is not None:
            reason = f"is not a model for {purpose}" if served[stated] else "does not exist"
            raise TextModelNotFound(f"The model `{stated[:_MAX_NAME]}` {reason}")
        if not fitting:
            raise TextModelNotFound(f"the server has no model for {purpose}")
        known = ", ".join(each.name for each, _ in fitting[:8])
        raise InvalidArgument(f"name one of the server's models for {purpose}: it has {known}")

    def reranker(self, members: Members) -> ServedVersion:
        """The model of a request to rank texts. Raises as ``model``."""
        return self.model(members.get("model"), _reranks, "reranking (with one class)")[0]

    def ranking(
        self,
        served: ServedVersion,
        members: Members,
        texts: Any,
        raw: bool,
        truncate: bool | None,
    ) -> InferRequest:
        """A request to ``served``, a ``reranker``, to score ``texts`` for the query of a request.

        Raises:
            InvalidArgument: a member is invalid.
        """
        query = members.get("query")
        if type(query) is not str or not query:
            raise InvalidArgument("'query' must be a string that is not empty")
        if type(texts) is not list or not texts or {*map(type, texts)} != {str}:
            raise InvalidArgument("the texts must be a list of at least one string")
        options: dict[str, Any] = {"function_to_apply": "none" if raw else "sigmoid"}
        if truncate is not None:
            options["truncate"] = truncate
        return text_inputs.make(text_inputs.pairs(query, texts), options, served.name)


class NoJsonObject(InvalidArgument):
    """A body is no JSON object."""


def _reranks(settings: TextSettings) -> bool:
    return settings.task is TextTask.CLASSIFICATION and len(settings.labels) == 1


def embeds(settings: TextSettings) -> bool:
    """Whether a model makes embeddings."""
    return settings.task is TextTask.EMBEDDING


def ranked(response: InferResponse) -> list[RerankedText]:
    """The texts that ``ranking`` asks about, the best first."""
    (scores,) = (tensor.data[:, 0] for tensor in response.outputs if tensor.name == "score")
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [RerankedText(index, float(scores[index])) for index in order]


def flag(members: Members, name: str, default: bool = False) -> bool:
    """A member that is true or false."""
    value = members.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise InvalidArgument(f"'{name}' must be true or false")
    return value


def require_known(members: Members, known: Collection[str]) -> None:
    """Raise ``InvalidArgument`` if a request has a member that is not ``known``."""
    for name in members:
        if name not in known:
            raise InvalidArgument(
                f"there is no member '{name[:64]}' here; the members are {', '.join(known)}"
            )


def _decoded(decode: Decode, body: bytes) -> tuple[InferRequest, Encode]:
    try:
        members = json_text.loads(body) if body else None
    except InvalidArgument as error:
        raise NoJsonObject(str(error)) from error
    if type(members) is not dict:
        raise NoJsonObject("the body must be a JSON object")
    return decode(members)
