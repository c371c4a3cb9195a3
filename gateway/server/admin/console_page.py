"""The console on the listener of the metrics port: a web page, and the API that it reads.

    GET /console         the page
    GET /console/FILE    its modules and its style sheet
    GET /v2/requests     the latest requests in the access log
    GET /v2/quotas       the quotas of ``access.toml``, or those of the caller
    /v2, /v2/...         the API of the HTTP port, and ``/predictions/...``

The files are those of the package and say nothing about a gateway, so they need no credential: a
browser sends no token for a page. The data come from the API, with the rights of the caller. The
policy allows no other script, no style within the page, and no other server.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from modelport.gateway.access.access import Access
from modelport.gateway.access.context import CURRENT, enter, required
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.quotas import Quota
from modelport.gateway.errors import NotFound
from modelport.gateway.protocols.http_message import (
    Answer,
    Handler,
    Headers,
    HttpRequest,
    HttpResponse,
)
from modelport.gateway.protocols.http_response import Recover, recovering
from modelport.gateway.telemetry.access_log import RecentRequests

#: Returns the latest requests of all serving processes; None: there is no access log.
Recent = Callable[[], Awaitable[RecentRequests | None]]
PAGE = "/console"
#: What is passed on to the API of the HTTP port; the last one takes pictures.
API = "/v2", "/v2/", "/predictions/"
FOLDER = Path(__file__).parents[1] / "console"
MEDIA_TYPES: Mapping[str, bytes] = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
_PROTECTION: Headers = [
    (b"content-security-policy", POLICY),
    (b"cache-control", b"no-cache"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]
NO_ACCESS_LOG = "no requests are kept; start the gateway with --access-log FILE, or '-' for stdout"


def mount(
    handler: Handler, api: Handler, recent: Recent, access: Access | None, refuse: Recover
) -> Handler:
    """Add the console, and the API of the HTTP port, to ``handler``.

    Args:
        refuse: Makes the response to an error.
    """
    own: Mapping[str, Handler] = {
        "/v2/requests": functools.partial(_requests, recent),
        "/v2/quotas": functools.partial(_quotas, access),
    }

    def both(request: HttpRequest) -> Answer:
        path, reads = request.path, request.method in ("GET", "HEAD")
        if path in own and reads:
            return recovering(own[path], refuse, request)
        if path == API[0] or path.startswith(API[1:]):
            return api(request)
        return (_file(path) if reads else None) or handler(request)

    return both


def _file(path: str) -> HttpResponse | None:
    """The response with a file; None: there is none."""
    if path == PAGE + "/":  # relative URLs of the page would be those of another folder
        return HttpResponse(308, b"", [(b"location", b"../console")])
    return _files().get(path)


@functools.cache
def _files() -> Mapping[str, HttpResponse]:
    """The responses with files, by path."""
    found = {
        f"{PAGE}/{file.name}": HttpResponse(
            200, file.read_bytes(), [(b"content-type", MEDIA_TYPES[file.suffix]), *_PROTECTION]
        )
        for file in FOLDER.iterdir()
        if file.suffix in MEDIA_TYPES
    }
    return {PAGE: found.pop(f"{PAGE}/index.html"), **found}


async def _requests(recent: Recent, _: HttpRequest) -> HttpResponse:
    enter(Operation.CONSOLE)
    found = await recent()
    if found is None:
        raise NotFound(NO_ACCESS_LOG)
    return HttpResponse(200, orjson.dumps({name: [*_seen(rows)] for name, rows in found.items()}))


async def _quotas(access: Access | None, _: HttpRequest) -> HttpResponse:
    enter(Operation.CONSOLE)
    rules: Sequence[Quota] = () if access is None else access.quotas.rules
    context = CURRENT.get()
    if access is not None and context is not None and not context.rights.unrestricted:
        names = access.policy.names
        rules = [quota for quota in rules if names(quota.principals, context.principal)]
    return HttpResponse(200, orjson.dumps([asdict(quota) for quota in rules]))


def _seen(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The requests that the caller may see: those for its models, or all."""
    if CURRENT.get() is None or required(Operation.CONSOLE).unrestricted:
        yield from rows
        return
    allowed = required(Operation.CONSOLE).versions
    for row in rows:
        versions = allowed[row["model"]] if "model" in row else None
        if versions is not None and (not versions or str(row.get("version")) in versions):
            yield row
