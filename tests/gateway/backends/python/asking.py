"""Requests to the models of ``python_models``."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from tests.server import Gateway


def ask(
    gateway: Gateway,
    code: str,
    model: str = "act",
    *,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> tuple[int, Any]:
    """Status of a request with ``code`` over HTTP, and its document, or its error."""
    document = {"inputs": [{"name": "code", "datatype": "BYTES", "shape": [1], "data": [code]}]}
    url = f"http://{gateway.http}/v2/models/{model}/infer"
    body = json.dumps({**document, **fields}).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, body, headers or {}), timeout=30
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]


def control(gateway: Gateway, model: str, verb: str = "load") -> str:
    """Load or unload; the error, if any."""
    url = f"http://{gateway.http}/v2/repository/models/{model}/{verb}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, b"{}")):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return str(json.load(error)["error"])
