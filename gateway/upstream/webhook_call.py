"""One call of a webhook: a signed POST request, of whose answer only the status is read."""

from __future__ import annotations

import hashlib
import hmac

import aiohttp

from modelport.gateway.errors import TimedOut, Unavailable

#: GitHub's signature, under our name.
SIGNATURE_HEADER = "x-modelport-signature-256"


def signature(secret: bytes, body: bytes) -> str:
    """The value of ``SIGNATURE_HEADER``."""
    return f"sha256={hmac.new(secret, body, hashlib.sha256).hexdigest()}"


async def call(url: str, body: bytes, secret: bytes, seconds: float) -> int:
    """Send the JSON document ``body``; return the status of the answer. Redirects are answers.

    Raises:
        TimedOut: no answer within ``seconds``.
        Unavailable: no connection, or no HTTP.
    """
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "modelport",
        SIGNATURE_HEADER: signature(secret, body),
    }
    timeout = aiohttp.ClientTimeout(total=seconds)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.post(url, data=body, headers=headers, allow_redirects=False) as response,
        ):
            return response.status
    except TimeoutError as error:
        raise TimedOut(f"no answer within {seconds:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unavailable(str(error)) from error
