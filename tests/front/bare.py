"""The least that pyvoy loads."""

from __future__ import annotations

from gateway.protocols.asgi import Receive, Scope, Send


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
