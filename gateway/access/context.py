"""The caller of the request in progress, and its operation.

Transports set ``CURRENT`` in the task of each request, only if ``--access`` is given.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from modelport.gateway.access.operations import Operation
from modelport.gateway.access.principal import Principal


@dataclass(slots=True)
class AccessContext:
    """The caller of a request, and its operation.

    Attributes:
        source: Address of the client, for the audit log.
        request_id: The client's ``x-request-id``, or empty.
        response_headers: Fields that the transport adds to the response, or to the trailing
            metadata over gRPC. They replace fields of the same name.
    """

    principal: Principal
    operation: Operation
    source: str = ""
    request_id: str = ""
    response_headers: list[tuple[bytes, bytes]] = field(default_factory=list)


CURRENT: ContextVar[AccessContext | None] = ContextVar("access", default=None)
