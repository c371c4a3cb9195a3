"""Shared memory extensions over HTTP: status, register, unregister."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request, Response

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols import request_body
from modelport.gateway.protocols.asgi import document
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http_operations import SHARED_MEMORY
from modelport.gateway.protocols.oip import schema as oip_schema
from modelport.gateway.protocols.oip.http_errors import OipErrors
from modelport.gateway.protocols.oip.shared_memory import CudaSharedMemory, SharedMemory
from modelport.gateway.wire import json_text

Name = Annotated[str, Path(description="Region name")]
#: Descriptions of the routes: status of all and of one, register, unregister one and all.
_SYSTEM = (
    "All registered regions.",
    "One registered region.",
    "Register `byte_size` bytes from `offset` of the object `key` (`shm_open`).",
    "Unregister a region. Requests in flight keep it.",
    "Unregister all regions.",
)
_CUDA = (
    "CUDA regions: always an empty list.",
    "404: there are no CUDA regions.",
    "Refused: CUDA shared memory is not supported.",
    "Accepted without effect, for clients that always call it.",
    "Accepted without effect, for clients that always call it.",
)


class SharedMemoryHttp(OipErrors):
    """The routes of ``/v2/systemsharedmemory`` and ``/v2/cudasharedmemory``."""

    segments = frozenset({"v2"})

    def __init__(self, host: DialectHost) -> None:
        self._shared = host.shared

    def add_routes(self, app: FastAPI) -> None:
        self._add_routes(app, "/v2/systemsharedmemory", self._shared, _SYSTEM)
        self._add_routes(app, "/v2/cudasharedmemory", CudaSharedMemory(self._shared), _CUDA)

    def _add_routes(
        self,
        app: FastAPI,
        folder: str,
        memory: SharedMemory | CudaSharedMemory,
        descriptions: tuple[str, str, str, str, str],
    ) -> None:
        all_status, one_status, registered, unregistered, all_unregistered = descriptions
        get = partial(app.get, tags=["shared memory"], dependencies=SHARED_MEMORY)
        post = partial(
            app.post,
            tags=["shared memory"],
            dependencies=SHARED_MEMORY,
            response_class=Response,  # without a body
        )
        region_path = f"{folder}/region/{{region}}"

        @get(f"{folder}/status", description=all_status)
        async def all_regions() -> Response:
            return document(memory.status())

        @get(f"{region_path}/status", description=one_status)
        async def one_region(region: Name) -> Response:
            return document(memory.status(region))

        @post(
            f"{region_path}/register",
            description=registered,
            openapi_extra=oip_schema.ANY_BODY,
        )
        async def register(region: Name, request: Request) -> Response:
            memory.require_allowed()
            body = json_text.loads(await request_body.read_control(request))
            await memory.register(region, *_registration(body))
            return _done()

        @post(f"{region_path}/unregister", description=unregistered)
        async def unregister(region: Name) -> Response:
            await memory.unregister(region)
            return _done()

        @post(f"{folder}/unregister", description=all_unregistered)
        async def unregister_all() -> Response:
            await memory.unregister()
            return _done()


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
