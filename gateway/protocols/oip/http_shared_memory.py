"""Shared memory extensions over HTTP: status, register, unregister."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request, Response

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols import request_body
from modelport.gateway.protocols.asgi import Receive, Scope, Send
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http_operations import SHARED_MEMORY
from modelport.gateway.protocols.http_response import document
from modelport.gateway.protocols.oip import schema as oip_schema
from modelport.gateway.protocols.oip.http_infer import OipErrors
from modelport.gateway.protocols.oip.shared_memory import cuda_status, refuse_cuda
from modelport.gateway.wire import json_text

Name = Annotated[str, Path(description="Region name")]
_TAG = "shared memory"


class SharedMemoryHttp(OipErrors):
    """The routes of ``/v2/systemsharedmemory`` and ``/v2/cudasharedmemory``."""

    segments = frozenset({"v2"})

    def __init__(self, host: DialectHost) -> None:
        self._shared = host.shared

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        return None

    def operation(self, scope: Scope) -> Operation:
        return Operation.SHARED_MEMORY

    def add_routes(self, app: FastAPI) -> None:
        shared = self._shared
        folder = "/v2/systemsharedmemory"

        @app.get(f"{folder}/status", tags=[_TAG], dependencies=SHARED_MEMORY)
        async def all_regions() -> Response:
            """All registered regions."""
            return document(shared.status())

        @app.get(f"{folder}/region/{{region}}/status", tags=[_TAG], dependencies=SHARED_MEMORY)
        async def one_region(region: Name) -> Response:
            """One registered region."""
            return document(shared.status(region))

        @app.post(
            f"{folder}/region/{{region}}/register",
            tags=[_TAG],
            dependencies=SHARED_MEMORY,
            openapi_extra=oip_schema.ANY_BODY,
        )
        async def register(region: Name, request: Request) -> Response:
            """Register `byte_size` bytes from `offset` of the object `key` (`shm_open`)."""
            shared.require_allowed()
            await shared.register(region, *_registration(await self._json(request)))
            return _done()

        @app.post(f"{folder}/region/{{region}}/unregister", tags=[_TAG], dependencies=SHARED_MEMORY)
        async def unregister(region: Name) -> Response:
            """Unregister a region. Requests in flight keep it."""
            await shared.unregister(region)
            return _done()

        @app.post(f"{folder}/unregister", tags=[_TAG], dependencies=SHARED_MEMORY)
        async def unregister_all() -> Response:
            """Unregister all regions."""
            await shared.unregister()
            return _done()

        self._add_cuda_routes(app)

    def _add_cuda_routes(self, app: FastAPI) -> None:
        """Add the routes that clients of system shared memory call too."""
        shared = self._shared
        folder = "/v2/cudasharedmemory"

        @app.get(f"{folder}/status", tags=[_TAG], dependencies=SHARED_MEMORY)
        async def all_cuda_regions() -> Response:
            """CUDA regions: always an empty list."""
            return document(cuda_status())

        @app.get(f"{folder}/region/{{region}}/status", tags=[_TAG], dependencies=SHARED_MEMORY)
        async def one_cuda_region(region: Name) -> Response:
            """404: there are no CUDA regions."""
            return document(cuda_status(region))

        @app.post(f"{folder}/region/{{region}}/register", tags=[_TAG], dependencies=SHARED_MEMORY)
        async def register_cuda(region: Name) -> Response:
            """Refused: CUDA shared memory is not supported."""
            refuse_cuda()
            return _done()

        @app.post(f"{folder}/region/{{region}}/unregister", tags=[_TAG], dependencies=SHARED_MEMORY)
        async def unregister_cuda(region: Name) -> Response:
            """Accepted without effect, for clients that always call it."""
            shared.require_allowed()
            return _done()

        @app.post(f"{folder}/unregister", tags=[_TAG], dependencies=SHARED_MEMORY)
        async def unregister_all_cuda() -> Response:
            """Accepted without effect, for clients that always call it."""
            shared.require_allowed()
            return _done()

    async def _json(self, request: Request) -> Any:
        return json_text.loads(await request_body.read_control(request.receive))


def _done() -> Response:
    return Response(media_type="application/json")


def _registration(body: Any) -> tuple[str, int, int]:
    """Parse key, offset and size of a region."""
    if type(body) is not dict:
        raise InvalidArgument("the request must be a JSON object")
    key = body.get("key")
    if type(key) is not str:
        raise InvalidArgument("Shared memory register request has no 'key' field that is a string")
    return (
        key,
        _unsigned("offset", body.get("offset", 0)),
        _unsigned("byte_size", body.get("byte_size")),
    )


def _unsigned(member: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise InvalidArgument(
            f"Shared memory register request has no '{member}' field that is an unsigned integer"
        )
    return value
