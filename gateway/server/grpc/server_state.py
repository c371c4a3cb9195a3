"""What the connections of one gRPC listener share; the event loop alone changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelport.gateway.server.grpc.service import Service
from modelport.gateway.server.grpc.stream import Stream
from modelport.gateway.server.listening import ConnectionLimit

if TYPE_CHECKING:
    from modelport.gateway.server.grpc.connection import GrpcConnection


class Shared:
    def __init__(self, service: Service, limit: ConnectionLimit) -> None:
        self.service = service
        self.limit = limit
        self.connections: set[GrpcConnection] = set()
        self.calls: set[Stream] = set()
