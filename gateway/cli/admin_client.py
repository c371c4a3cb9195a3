"""A client of the gateway's admin listener: JSON over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from typing import Any

from modelport.gateway.cli import server_credentials
from modelport.gateway.errors import (
    AlreadyExists,
    InvalidArgument,
    ModelportError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from modelport.gateway.upstream import tls_errors

DEFAULT_URL = "http://localhost:8002"
#: A start waits until the candidate is loaded.
TIMEOUT_SECONDS = 1800.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
#: By status; any other means ``Unavailable``.
_ERRORS: dict[int, type[ModelportError]] = {
    400: InvalidArgument,
    401: Unauthenticated,
    403: PermissionDenied,
    404: NotFound,
    409: AlreadyExists,
    415: InvalidArgument,
}


class AdminClient:
    """Requests to the admin listener at ``url``, with the credentials of the command at hand.

    Args:
        named: The name of ``url`` in the command, for errors.

    Raises:
        InvalidArgument: ``url`` is not an http:// URL, or a file of the credentials cannot be used.
    """

    def __init__(self, url: str, named: str = "--url") -> None:
        self._named = named
        given = server_credentials.current()
        scheme = "https" if given.needs_tls else "http"
        if "@" in url:
            raise InvalidArgument(server_credentials.USER_IN_URL.replace("--url", named))
        try:
            parts = urllib.parse.urlsplit(url if "//" in url else f"{scheme}://{url}")
            valid = parts.scheme in ("http", "https") and bool(parts.hostname)
            self._address = parts.hostname or "", parts.port
        except ValueError:  # a port out of range, or unbalanced brackets
            valid = False
        if not valid:
            raise InvalidArgument(f"{named} '{url}' is not http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._tls = given.context() if parts.scheme == "https" else None
        token = given.token()
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str) -> Any:
        """The document at ``path``.

        Raises:
            Unavailable: no gateway answers.
            ModelportError: the gateway's error.
        """
        return self._document(path, *self._request("GET", path, None))

    def text(self, path: str) -> str:
        """The text at ``path``; errors as ``get``."""
        status, content = self._request("GET", path, None)
        if status != 200:
            self._document(path, status, content)
        return content.decode(errors="replace")

    def post(self, path: str, document: Any) -> Any:
        """The answer to ``document``; errors as ``get``."""
        content = json.dumps(document).encode()
        return self._document(path, *self._request("POST", path, content))

    def _request(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = (
            http.client.HTTPConnection(*self._address, timeout=TIMEOUT_SECONDS)
            if self._tls is None
            else http.client.HTTPSConnection(
                *self._address, timeout=TIMEOUT_SECONDS, context=self._tls
            )
        )
        headers = dict(self._headers)
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(
                tls_errors.explain(error, self.url)
                or f"no gateway responds at {self.url}; start one with 'modelport serve', or give "
                f"the address of its metrics port with {self._named}"
            ) from error
        finally:
            connection.close()

    def _document(self, path: str, status: int, content: bytes) -> Any:
        try:
            document = json.loads(content)
        except ValueError:
            document = None
        if status == 200 and document is not None:
            return document
        reason = document.get("error") if isinstance(document, dict) else None
        if reason is None or (status == 404 and reason == "Not Found"):
            raise InvalidArgument(
                f"{self.url} does not serve {path} (status {status}); {self._named} is the address "
                "of the gateway's metrics port"
            )
        raise _ERRORS.get(status, Unavailable)(str(reason))
