"""Rules about the header fields of requests, as in Triton.

A *restricted* group of the API needs a field with a certain value. *Forwarded* fields become
parameters of inference requests.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial

from modelport.gateway.access.context import RESTRICTION, note_refusal
from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import InvalidArgument, PermissionDenied
from modelport.gateway.models.inference_service import SupportsInference
from modelport.gateway.protocols.http_message import HttpRequest
from modelport.gateway.protocols.oip import parameters
from modelport.gateway.settings import HeaderRules, Restriction
from modelport.gateway.types import Answer, Deadline, InferRequest, InferResponse

Fields = Iterable[tuple[bytes, bytes]]
_GROUPS = {
    Operation.HEALTH: "health",
    Operation.METADATA: "metadata",
    Operation.INFER: "inference",
    Operation.SHARED_MEMORY: "shared-memory",
    Operation.CONTROL: "model-repository",
    Operation.STATISTICS: "statistics",
}
#: Paths whose group is another than that of their operation, by the group's name.
_PATHS = re.compile(
    r"(?P<model_config>/v2/models/.+/config|/inference\.\w+/ModelConfig)"
    r"|(?P<model_repository>/v2/repository/.+|/inference\.\w+/Repository\w+)"
    r"|(?P<trace>/v2/(?:models/.+/)?trace/setting|/inference\.\w+/TraceSetting)"
    r"|(?P<logging>/v2/logging|/inference\.\w+/LogSettings)"
)
#: What is forwarded of the request in progress: the names, and its fields.
FORWARDED: ContextVar[tuple[re.Pattern[str], Fields] | None] = ContextVar("forwarded", default=None)
#: Fields of gRPC itself, which its own servers do not show.
_TRANSPORT = re.compile("grpc-.*|te|content-type")


def group_of(operation: Operation, path: str) -> str:
    """The group of an HTTP path or of gRPC's path of a method; empty: it is in none."""
    found = _PATHS.fullmatch(path)
    if found and found.lastgroup:
        return found.lastgroup.replace("_", "-")
    return _GROUPS.get(operation, "")


def objection(
    rules: HeaderRules, kind: str, operation: Operation, path: str, fields: Mapping[bytes, bytes]
) -> str:
    """Say which field a request lacks; empty: none. ``kind`` is Triton's word for the group."""
    restriction = rules.restricted.get(group_of(operation, path))
    if restriction is None or _has(fields, restriction):
        return ""
    return f"This {kind} is restricted, expecting header '{restriction.header}'"


def _has(fields: Mapping[bytes, bytes], restriction: Restriction) -> bool:
    value = fields.get(restriction.header.lower().encode(), b"")
    return hmac.compare_digest(value, restriction.value.encode())


def begin(rules: HeaderRules, request: HttpRequest) -> None:
    """Apply ``rules`` to an HTTP request: to the operation that it enters, and to its inference."""
    RESTRICTION.set(partial(_require, rules, request))
    if rules.forwarded is not None:
        FORWARDED.set((rules.forwarded, request.headers))


def begin_call(pattern: re.Pattern[str], fields: Mapping[bytes, bytes]) -> None:
    """Have a gRPC call's inference get the metadata that ``pattern`` matches."""
    shown = [
        field for field in fields.items() if not _TRANSPORT.fullmatch(field[0].decode("latin-1"))
    ]
    FORWARDED.set((pattern, shown))


def _require(rules: HeaderRules, request: HttpRequest, operation: Operation) -> None:
    message = objection(rules, "API", operation, request.path, request.fields)
    if message:
        note_refusal(message)
        raise PermissionDenied(message)


class ForwardingService:
    """An inference service whose requests have header fields as parameters.

    A field replaces the client's own parameter of its name.
    """

    def __init__(self, service: SupportsInference) -> None:
        self._service, self.refuses = service, service.refuses

    def infer(self, request: InferRequest, deadline: Deadline) -> Answer:
        _forward(request)
        return self._service.infer(request, deadline)

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        _forward(request)
        async with aclosing(self._service.stream(request, deadline)) as responses:
            async for response in responses:
                yield response


def _forward(request: InferRequest) -> None:
    found = FORWARDED.get()
    if found is None:
        return
    pattern, fields = found
    names = ((name.decode("latin-1"), value) for name, value in fields)
    forwarded = {
        name: value.decode("utf-8", "replace") for name, value in names if pattern.search(name)
    }
    for name in forwarded:
        if parameters.is_reserved(name):
            raise InvalidArgument(
                f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
            )
    request.parameters = {**request.parameters, **forwarded}
