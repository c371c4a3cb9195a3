"""Escaping of texts from users and servers for a line, an attribute or an XML file."""

from __future__ import annotations

import re
from datetime import datetime

#: Characters that XML 1.0 forbids, and characters that reverse the text direction.
_UNFIT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]"
)


def fit(text: str) -> str:
    """Remove the characters that XML 1.0 forbids."""
    return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", text)


def line(text: str, most: int | None = None) -> str:
    """``text`` as one line, cut to ``most`` characters."""
    joined = " ".join(fit(text).split())
    return joined if most is None or len(joined) <= most else joined[: most - 1].rstrip() + "…"


def slug(text: str) -> str:
    """``text`` as a file name or an id: letters, digits, hyphens; never empty."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "unnamed"


def when(moment: str) -> str:
    """ISO 8601 in a readable form, to the minute; other texts are unchanged."""
    try:
        found = datetime.fromisoformat(moment)
    except ValueError:
        return line(moment)
    return f"{found:%Y-%m-%d %H:%M} {found.tzname() or ''}".strip()
