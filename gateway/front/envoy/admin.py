"""Envoy's administration, over its Unix socket."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 5.0


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Admin:
    """``path``: of the socket. Raises ``OSError`` while Envoy does not answer there."""

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)

    async def post(self, target: str) -> None:
        await asyncio.to_thread(self._exchange, "POST", target)

    async def get(self, target: str) -> Any:
        """The JSON document at ``target``."""
        return json.loads(await asyncio.to_thread(self._exchange, "GET", target))

    def _exchange(self, method: str, target: str) -> bytes:
        connection = _Connection(self._path)
        try:
            connection.request(method, target)
            response = connection.getresponse()
            content = response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()
        if response.status != 200:
            raise ConnectionError(f"Envoy's administration answers {response.status} to {target}")
        return content
