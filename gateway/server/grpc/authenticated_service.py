"""Authentication of gRPC calls, before their messages are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from modelport.gateway.access import context as access_context
from modelport.gateway.access.access import Access
from modelport.gateway.access.authentication import combined
from modelport.gateway.access.principal import ConnectionIdentity
from modelport.gateway.errors import ModelportError
from modelport.gateway.server.grpc.service import CallTarget, Ending, Service
from modelport.gateway.server.grpc.status import status

if TYPE_CHECKING:
    from modelport.gateway.server.grpc.stream import GrpcStream


class AuthenticatedService(Service):
    """A ``Service`` that admits calls by their credential and their method's operation."""

    def __init__(self, access: Access, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._access = access

    def mapping(self, fields: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
        """Make the headers of a call, repeated ones joined."""
        return combined(fields)

    def target(self, path: bytes, headers: Mapping[bytes, bytes]) -> CallTarget:
        """Interpret ``headers`` but their credential: calls with equal headers share the result."""
        target = super().target(path, headers)
        return target if target.method is None else target._replace(headers=headers)

    def admit(self, target: CallTarget, connection: ConnectionIdentity) -> CallTarget:
        """Return the target of a call that has just begun, or of its refusal."""
        if target.method is None or target.headers is None:
            return target
        try:
            context = self._access.authenticate(target.headers, connection)
            context.enter(target.method.operation)
        except ModelportError as error:
            return CallTarget(refusal=Ending(status(target.method, error), str(error)))
        return target._replace(headers=None, access=context)

    def refuses(self, target: CallTarget, body: bytes | memoryview) -> bool:
        """Refuse nothing unread: ``serve`` refuses it under overload, and knows the caller."""
        return False

    async def serve(self, target: CallTarget, call: GrpcStream) -> None:
        """Answer ``call`` for its caller."""
        access_context.CURRENT.set(target.access)
        await super().serve(target, call)
