"""Download of a small document over HTTPS."""

from __future__ import annotations

import ssl

import aiohttp

from modelport.gateway.errors import TimedOut, Unavailable


async def download(url: str, max_bytes: int, seconds: float, tls: ssl.SSLContext) -> bytes:
    """Return the document at ``url``, at most ``max_bytes``. Redirects are errors.

    Raises:
        TimedOut: It is not complete after ``seconds``.
        Unavailable: There is no connection, no such document, or it is too large.
    """
    # A compressed document could be larger than what was counted.
    headers = {
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "User-Agent": "modelport",
    }
    timeout = aiohttp.ClientTimeout(total=seconds)
    try:
        async with (
            aiohttp.ClientSession(
                timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            ) as session,
            session.get(url, headers=headers, allow_redirects=False, ssl=tls) as response,
        ):
            if response.status != 200:
                raise Unavailable(f"the server answered with status {response.status}")
            content = bytearray()
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > max_bytes:
                    raise Unavailable(f"the document is larger than {max_bytes} bytes")
            return bytes(content)
    except TimeoutError as error:
        raise TimedOut(f"no complete response within {seconds:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unavailable(str(error) or type(error).__name__) from error
