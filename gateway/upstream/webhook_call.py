"""One call of a webhook: a signed POST request. Only the status of the answer is read."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp

from modelport.gateway.errors import TimedOut, Unavailable


async def call(url: str, body: bytes, signature: Mapping[str, str], seconds: float) -> int:
    """Send the JSON document ``body``; return the status of the answer. Redirects are answers.

    Args:
        signature: the header of the signature, by name.

    Raises:
        TimedOut: no response within ``seconds``.
        Unavailable: no connection, or no HTTP.
    """
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "modelport",
        **signature,
    }
    timeout = aiohttp.ClientTimeout(total=seconds)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.post(url, data=body, headers=headers, allow_redirects=False) as response,
        ):
            return response.status
    except TimeoutError as error:
        raise TimedOut(f"no response within {seconds:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unavailable(str(error)) from error
