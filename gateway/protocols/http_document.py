"""JSON documents of FastAPI's routes."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Response


def document(value: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")
