"""Authentication of gRPC calls, before their messages are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelport.gateway.access.access import Access
from modelport.gateway.access.context import CURRENT, AccessContext, Fields
from modelport.gateway.access.principal import ConnectionIdentity
from modelport.gateway.errors import ModelportError
from modelport.gateway.protocols.grpc_method import Method
from modelport.gateway.server.grpc.service import CallTarget, Ending, Service
from modelport.gateway.server.grpc.status import status

if TYPE_CHECKING:
    from modelport.gateway.server.grpc.stream import GrpcStream


class AuthenticatedService(Service):
    """A ``Service`` that admits calls by their credential and their method's operation."""

    def __init__(self, access: Access, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._access = access

    def admit(
        self,
        method: Method,
        headers: Fields,
        connection: ConnectionIdentity,
        credential: tuple[bytes, ...],
    ) -> AccessContext | Ending:
        """Return the context of a call that has just begun, or its refusal."""
        try:
            context = self._access.authenticate(
                headers, connection, credential, method.request_streams
            )
            return context.entering(method.operation)
        except ModelportError as error:
            return Ending(status(method, error), str(error))

    def refuses(self, target: CallTarget, body: bytes | memoryview) -> bool:
        """Refuse nothing unread: ``serve`` refuses it under overload, and knows the caller."""
        return False

    def renew(self, call: GrpcStream) -> None:
        """Authenticate the caller again: its credential may have ended during a stream."""
        if call.access is not None:
            self._access.renew(call.access)

    async def serve(self, target: CallTarget, call: GrpcStream) -> None:
        """Answer ``call`` for its caller."""
        CURRENT.set(call.access)
        await super().serve(target, call)
