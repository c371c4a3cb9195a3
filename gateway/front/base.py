"""A front puts one ASGI application and one table of gRPC methods on sockets."""

from __future__ import annotations

from typing import Protocol

from gateway.types import Deadline


class Front(Protocol):
    #: The ports really bound; they differ from the settings' where those say 0.
    http_port: int
    grpc_port: int

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            Unavailable: an address cannot be bound; the message names the flag to change.
        """

    async def lame_duck(self, seconds: float) -> None:
        """Serve on for ``seconds`` while clients are told, and learn, to go elsewhere."""

    async def drain(self, deadline: Deadline) -> None:
        """Take no new request; those in flight finish, or are refused at the deadline."""
