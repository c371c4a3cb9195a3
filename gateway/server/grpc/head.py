"""A request's header block, read once: what is asked for, or what is wrong with it."""

from __future__ import annotations

import re
from typing import NamedTuple

from modelport.gateway.server.grpc.service import Service, Target
from modelport.gateway.wire.header_blocks import Fields

_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_REQUIRED = frozenset((b":method", b":scheme", b":path"))
#: Of HTTP/1.1's connections (RFC 9113, 8.2.2).
_FORBIDDEN = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
#: RFC 9113, 8.2.1.
_NAME = re.compile(rb":?[^\x00-\x20A-Z:\x7f-\xff]+\Z")
_BAD_IN_VALUE = re.compile(rb"[\x00\r\n]")


class Head(NamedTuple):
    """A block of fields.

    ``malformed`` in a request and ``trailers`` at its end are as RFC 9113, 8.1, has them.
    ``http_status``: what one that is no gRPC is answered, instead of 200.
    """

    target: Target
    malformed: bool = False
    trailers: bool = False
    content_length: int | None = None
    http_status: int | None = None


def read(service: Service, fields: Fields) -> Head:
    """What ``fields`` say."""
    headers: dict[bytes, bytes] = {}
    sound, regular = True, False
    for name, given in fields:
        # The RFC has a field with blanks at its ends malformed; grpc-core sends such metadata.
        value = given.strip(b" \t")
        if name[:1] == b":":
            sound &= name in _PSEUDO and not regular and name not in headers
        else:
            regular = True
            sound &= name not in _FORBIDDEN and (name != b"te" or value == b"trailers")
        sound &= _NAME.match(name) is not None and _BAD_IN_VALUE.search(value) is None
        headers[name] = value
    trailers = sound and not any(name[:1] == b":" for name in headers)
    length = headers.get(b"content-length")
    if length is not None:
        sound &= length.isdigit() and len(length) < 20
    path = headers.get(b":path", b"")
    if not sound or not headers.keys() >= _REQUIRED or not path:
        return Head(Target(), True, trailers)
    http_status = None
    if headers[b":method"] != b"POST":
        http_status = 405
    elif not headers.get(b"content-type", b"").startswith(b"application/grpc"):
        http_status = 415
    size = None if length is None else int(length)
    return Head(service.target(path, headers), False, trailers, size, http_status)
