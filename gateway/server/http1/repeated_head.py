"""Heads that are the same as in the request before, which most clients send."""

from __future__ import annotations

from typing import NamedTuple

from modelport.gateway.protocols.asgi import HEAD_NOTES, Scope

#: Longer requests are parsed; to parse their heads is a small part of their cost.
MAX_MESSAGE_BYTES = 4096
_END = b"\r\n\r\n"


class RepeatedHead(NamedTuple):
    """The head that two requests of a connection had in a row, byte for byte.

    Attributes:
        message_bytes: The size of a request with this head, its body included.
        template: The scope of such a request, with ``HEAD_NOTES``; its headers are in ``headers``.
    """

    head: bytes
    message_bytes: int
    template: Scope
    headers: tuple[tuple[bytes, bytes], ...]

    def scope(self) -> Scope:
        """Make the ASGI scope of one more request; applications may change it."""
        made = dict(self.template)
        made["headers"] = list(self.headers)
        return made


def repeated_head(previous: bytes, data: bytes, scope: Scope) -> RepeatedHead | None:
    """Return the head of ``data`` if ``previous`` begins with it, too; otherwise None.

    Args:
        previous: The bytes of the request before.
        data: The bytes of one request whose body is not chunked, and no others.
        scope: What was parsed of ``data``.
    """
    head = data[: data.find(_END) + len(_END)]
    if not previous.startswith(head) or scope["method"] != "POST":
        return None
    # A head with a line that ends in LF alone may end elsewhere.
    lengths = [int(value) for name, value in scope["headers"] if name == b"content-length"]
    if head.count(b"\n") != head.count(b"\r\n") or lengths != [len(data) - len(head)]:
        return None
    template = {**scope, HEAD_NOTES: {}}
    return RepeatedHead(head, len(data), template, tuple(scope["headers"]))
