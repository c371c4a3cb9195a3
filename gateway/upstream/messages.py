"""Error messages of other servers, made fit for clients."""

from __future__ import annotations

import re

MAX_REASON = 500
_FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s\"':/]+/)+")
#: An IPv6 address has at least two colons; ``[1]`` and ``[-1,4]`` are shapes.
_ADDRESSES = re.compile(
    r"(?:ipv[46]:)?(?:\[[0-9a-f.]*:[0-9a-f.]*:[0-9a-f:.]*(?:%\w+)?\]|\d+\.\d+\.\d+\.\d+)(?::\d+)?"
)


def public(text: str) -> str:
    """The first line of another server's message, without folders and addresses."""
    lines = text.strip().splitlines() or [""]
    return _ADDRESSES.sub("the server", _FOLDERS.sub("", lines[0]))[:MAX_REASON]
