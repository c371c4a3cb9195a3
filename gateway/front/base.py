"""A front puts one ASGI application and one table of gRPC methods on sockets."""

from __future__ import annotations

from typing import Protocol


class Front(Protocol):
    #: The ports really bound; they differ from the settings' where those say 0.
    http_port: int
    grpc_port: int

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            Unavailable: an address cannot be bound; the message names the flag to change.
        """

    async def lame_duck(self) -> None:
        """Serve on for a moment while clients are told, and learn, to go elsewhere."""

    async def drain(self, timeout_seconds: float) -> None:
        """Take no new request, let those in flight finish for at most ``timeout_seconds``."""
