"""The OpenAPI document: what the routes declare, and the errors of their dialects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

Schema = dict[str, Any]

JSON, BYTES = "application/json", "application/octet-stream"


def error_schema(**members: str) -> Schema:
    """Return the schema of an error with these members, by their types."""
    properties = {name: {"type": kind} for name, kind in members.items()}
    return {"type": "object", "required": list(members), "properties": properties}


ERROR = error_schema(error="string")
#: Statuses of a request that has no route, that its caller may not send, or that the server
#: refuses before any dialect sees it; their errors have the schema ``ERROR``, or the dialect's.
REFUSALS = (400, 401, 403, 404, 405, 408, 429, 431, 501, 503, 508)


class DocumentedErrors(Protocol):
    """The errors of a dialect."""

    #: Statuses of all errors.
    statuses: Collection[int]
    error: Schema


def with_errors(
    document: Schema, dialects_of: Callable[[str], Sequence[DocumentedErrors]]
) -> Schema:
    """Add the errors that every operation may return, by the dialects of its path."""
    for path, operations in document["paths"].items():
        dialects = dialects_of(path)
        statuses = {*REFUSALS, *(status for each in dialects for status in each.statuses)}
        schemas = [ERROR, *(each.error for each in dialects if each.error != ERROR)]
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)  # FastAPI's; this API never sends it
            for status in sorted(statuses):
                _add(responses, status, schemas)
    return document


def _add(responses: Schema, status: int, schemas: Sequence[Schema]) -> None:
    """Add an error to what a route declares of ``status`` itself."""
    response = responses.setdefault(str(status), {})
    response.setdefault("description", HTTPStatus(status).phrase)
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        allow = {"description": "the methods of the path", "schema": {"type": "string"}}
        response["headers"] = {"Allow": allow}
    body: Mapping[str, Any] = response.get("content", {})
    own = body.get(JSON, {}).get("schema")
    every = [own, *schemas] if own else list(schemas)
    schema = {"anyOf": every} if len(every) > 1 else every[0]
    response["content"] = {**body, JSON: {"schema": schema}}
