"""Single requests to servers that no route names: the call of a webhook, a small download."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from modelport.gateway.errors import TimedOut, Unavailable
from modelport.gateway.upstream import connection_errors


async def call_webhook(url: str, body: bytes, signature: Mapping[str, str], seconds: float) -> int:
    """Send the JSON document ``body`` in a POST request; return the status of the answer.

    Redirects are answers. Nothing else of the answer is read.

    Args:
        signature: the header of the signature, by name.

    Raises:
        TimedOut: no response within ``seconds``.
        Unavailable: no connection, or no HTTP.
    """
    headers = {"Content-Type": "application/json", **signature}
    async with _request("POST", url, seconds, "response", headers, data=body) as response:
        return response.status


async def download(url: str, max_bytes: int, seconds: float, tls: ssl.SSLContext) -> bytes:
    """Return the document at ``url``, at most ``max_bytes``. Redirects are errors.

    Raises:
        TimedOut: It is not complete after ``seconds``.
        Unavailable: There is no connection, no such document, or it is too large.
    """
    # A compressed document could be larger than what was counted.
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    async with _request("GET", url, seconds, "complete response", headers, ssl=tls) as response:
        if response.status != 200:
            raise Unavailable(f"the server answered with status {response.status}")
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > max_bytes:
                raise Unavailable(f"the document is larger than {max_bytes} bytes")
        return bytes(content)


@contextlib.asynccontextmanager
async def _request(
    method: str, url: str, seconds: float, missing: str, headers: dict[str, str], **options: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response; ``missing`` names it in the error after ``seconds``."""
    headers["User-Agent"] = "modelport"
    session = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )
    try:
        async with (
            session,
            session.request(
                method, url, headers=headers, allow_redirects=False, **options
            ) as response,
        ):
            yield response
    except TimeoutError as error:
        raise TimedOut(f"no {missing} within {seconds:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unavailable(connection_errors.reason(error)) from error
