"""What the connections of one gRPC listener share; the event loop alone changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.front.grpc.service import Service
from gateway.front.grpc.stream import Stream
from gateway.front.listening import ConnectionLimit

if TYPE_CHECKING:
    from gateway.front.grpc.connection import GrpcConnection


class Shared:
    def __init__(self, service: Service, limit: ConnectionLimit) -> None:
        self.service = service
        self.limit = limit
        self.connections: set[GrpcConnection] = set()
        self.calls: set[Stream] = set()
