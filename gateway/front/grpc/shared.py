"""What the connections of one gRPC listener share; the event loop alone changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.front.grpc.service import Service
from gateway.front.grpc.stream import Stream

if TYPE_CHECKING:
    from gateway.front.grpc.connection import GrpcConnection


class Shared:
    def __init__(self, service: Service, max_connections: int) -> None:
        self.service = service
        self.max_connections = max_connections
        self.connections: set[GrpcConnection] = set()
        self.calls: set[Stream] = set()
