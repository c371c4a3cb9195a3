"""The pages about the HTTP API: its OpenAPI document, and two that show it."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html

from modelport.gateway.protocols.http_operations import METADATA
from modelport.gateway.protocols.http_response import document

_DOCUMENT = "/openapi.json"


def add(app: FastAPI) -> None:
    """Add the pages where FastAPI has them by default."""

    @app.get(_DOCUMENT, include_in_schema=False, dependencies=METADATA)
    async def openapi() -> Response:
        return document(app.openapi())

    @app.get("/docs", include_in_schema=False, dependencies=METADATA)
    async def swagger() -> Response:
        return get_swagger_ui_html(openapi_url=_DOCUMENT, title=f"{app.title} - Swagger UI")

    @app.get("/redoc", include_in_schema=False, dependencies=METADATA)
    async def redoc() -> Response:
        return get_redoc_html(openapi_url=_DOCUMENT, title=f"{app.title} - ReDoc")
