"""The OpenAPI document, and Swagger UI, which shows it at ``GET /docs``.

The files of Swagger UI belong to the package, so the page needs no other server. The page is in the
origin that can unload models: its policy allows no other script, and no request to another server.
``make swagger-ui`` fetches the files.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
from pathlib import Path

from fastapi import FastAPI, Response

from modelport.gateway.protocols import http_operations
from modelport.gateway.protocols.asgi import document

#: The release; part of the files' paths, because browsers keep them.
VERSION = "5.35.0"
#: File → its media type, and its digest for the browser, which refuses other content.
FILES = {
    "swagger-ui-bundle.js": (
        "text/javascript; charset=utf-8",
        "sha384-gjRm0bEPMeTmMh5jT2cHccIwCUZSTd8YC+j0d0sXw0MdGEfScduGpSyF3ZSSLkX9",
    ),
    "swagger-ui.css": (
        "text/css; charset=utf-8",
        "sha384-WlYgdmXYOOBWL5apwjDEZwN+U3HmXSSu5R6V5aGxEcf7z+KuRNwBhoxKVN1i3D5I",
    ),
}
_FOLDER = Path(__file__).with_name("swagger_ui")
_DOCUMENT, _PAGE = "/openapi.json", "/docs"

# All paths are relative, for a proxy that adds a prefix. Without ``validatorUrl`` the document's
# address would be sent to swagger.io.
_START = """
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
});
"""
_HTML = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>modelport - Swagger UI</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/{VERSION}/swagger-ui.css"
 integrity="{FILES["swagger-ui.css"][1]}">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/{VERSION}/swagger-ui-bundle.js"
 integrity="{FILES["swagger-ui-bundle.js"][1]}"></script>
<script>{_START}</script>
</body>
</html>
"""
_START_HASH = base64.b64encode(hashlib.sha256(_START.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; script-src 'self' 'sha256-{_START_HASH}'; connect-src 'self'; "
    # Swagger UI sets styles on its elements, and its icons are URLs with the data.
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_NO_SNIFFING = {"X-Content-Type-Options": "nosniff"}
_KEPT = {"Cache-Control": "private, max-age=31536000, immutable"}


def add_routes(app: FastAPI) -> None:
    """Add the document, the page and its files."""

    @app.get(_DOCUMENT, include_in_schema=False, dependencies=http_operations.METADATA)
    async def openapi() -> Response:
        return document(app.openapi(), headers=_NO_SNIFFING)

    @app.get(_PAGE, include_in_schema=False, dependencies=http_operations.METADATA)
    async def swagger_ui() -> Response:
        headers = _NO_SNIFFING | {"Content-Security-Policy": _POLICY}
        return Response(_HTML, headers=headers, media_type="text/html")

    for name in FILES:
        _add_file(app, name)


def _add_file(app: FastAPI, name: str) -> None:
    path, headers = f"{_PAGE}/{VERSION}/{name}", _NO_SNIFFING | _KEPT

    @app.get(path, include_in_schema=False, dependencies=http_operations.METADATA)
    async def file() -> Response:
        return Response(_content(name), headers=headers, media_type=FILES[name][0])


@functools.cache
def _content(name: str) -> bytes:
    return gzip.decompress((_FOLDER / f"{name}.gz").read_bytes())
