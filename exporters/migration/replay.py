"""Replay of recorded requests to the old TorchServe and to the gateway, with a comparison."""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelport.exporters.migration.report import ReplayComparison
from modelport.gateway.errors import UsageError
from modelport.gateway.repository import untrusted_files
from modelport.gateway.upstream import connection_errors

MAX_BODY_BYTES = 64 << 20
TIMEOUT_SECONDS = 60.0

#: Content types by suffix of a recorded body; other bodies are sent as bytes.
CONTENT_TYPES = {
    ".json": "application/json",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".txt": "text/plain",
}
BYTES = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class ReplayServer:
    """A server at ``url``, ``http://host:port``; every request carries ``headers``."""

    url: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ReplayAnswer:
    """An answer; ``status`` 0 means none came, and ``body`` has the reason."""

    status: int
    body: bytes


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


def server(url: str, flag: str, headers: Mapping[str, str] | None = None) -> ReplayServer:
    """Parse a server's address; raise ``UsageError`` unless it looks like ``http://host:8080``."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = None
    if not good or parts.path.strip("/") or parts.query or parts.fragment:
        raise UsageError(f"{flag} '{url}' is not an address; write http://host:8080")
    return ReplayServer(url.rstrip("/"), headers or {})


def recorded(path: Path) -> list[Path]:
    """The recorded bodies at ``path``: a file, or every file in a folder, by name.

    Raises:
        UsageError: there are none, or one is too large.
    """
    files = [path] if path.is_file() else []
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.is_file() and not f.name.startswith("."))
    if not files:
        raise UsageError(f"--requests '{path}' holds no recorded requests; give bodies as files")
    for file in files:
        if file.stat().st_size > MAX_BODY_BYTES:
            raise UsageError(f"--requests: '{file.name}' is larger than {MAX_BODY_BYTES} bytes")
    return files


def compare(
    old: ReplayServer, new: ReplayServer, model: str, file: Path, tolerance: float
) -> ReplayComparison:
    """Send the body in ``file`` to ``/predictions/{model}`` of both servers.

    Two answers are equal if they have the same status and, for status 200, the same structure with
    every number within ``tolerance * max(1, |old|)``. The wording of errors is not compared.
    """
    body = untrusted_files.read(file, MAX_BODY_BYTES)
    kind = CONTENT_TYPES.get(file.suffix.lower(), BYTES)
    answers = [_ask(each, model, body, kind) for each in (old, new)]
    statuses = (answers[0].status, answers[1].status)

    def verdict(problem: str, largest: float | None = None) -> ReplayComparison:
        return ReplayComparison(file.name, statuses, largest, problem)

    for answer, who in zip(answers, ("the old server", "the gateway"), strict=True):
        if not answer.status:
            return verdict(f"{who} did not respond: {answer.body.decode(errors='replace')}")
    if statuses[0] != statuses[1]:
        which = answers[0] if statuses[0] >= 400 else answers[1]
        return verdict(f"status {statuses[0]} and {statuses[1]}: {_excerpt(which.body)}")
    if statuses[0] != http.client.OK:
        return verdict("")
    parsed = [_parse(answer.body) for answer in answers]
    if parsed[0] is None or parsed[1] is None:
        same = answers[0].body == answers[1].body
        return verdict("" if same else "the bodies differ, and one is not JSON")
    difference = Difference(tolerance)
    difference.walk("answer", parsed[0], parsed[1])
    return verdict(difference.problem, difference.largest)


class Difference:
    """The differences between two JSON values.

    Attributes:
        largest: the largest absolute difference of two numbers; None: there were no numbers.
        problem: the first place where they differ by more than the tolerance; empty: none.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self.largest: float | None = None
        self.problem = ""

    def walk(self, where: str, old: Any, new: Any) -> None:
        """Compare two values. Iterative, because the servers determine the nesting."""
        waiting = [(where, old, new)]
        while waiting:
            where, old, new = waiting.pop()
            if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
                waiting += [(f"{where}.{key}", old[key], new[key]) for key in reversed(old)]
            elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
                pairs = enumerate(zip(old, new, strict=True))
                waiting += [(f"{where}[{i}]", a, b) for i, (a, b) in reversed([*pairs])]
            elif _is_number(old) and _is_number(new):
                self._numbers(where, float(old), float(new))
            elif type(old) is not type(new) or old != new:
                self._note(f"{where} was {_shown(old)} and is {_shown(new)}")

    def _numbers(self, where: str, old: float, new: float) -> None:
        if math.isfinite(old) and math.isfinite(new):
            distance = abs(old - new)
            allowed = self._tolerance * max(1.0, abs(old))
        else:
            distance = 0.0 if old == new or (math.isnan(old) and math.isnan(new)) else math.inf
            allowed = 0.0
        self.largest = max(self.largest or 0.0, distance)
        if distance > allowed:
            self._note(f"{where} was {old:g} and is {new:g}")

    def _note(self, problem: str) -> None:
        self.problem = self.problem or problem


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, list(value)[:6])) or 'nothing'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return repr(value)[:80]


def _ask(server: ReplayServer, model: str, body: bytes, content_type: str) -> ReplayAnswer:
    url = f"{server.url}/predictions/{urllib.parse.quote(model, safe='')}"
    headers = {"Content-Type": content_type, **server.headers}
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        with _opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            return _read(answer)
    except urllib.error.HTTPError as error:
        with error:
            return _read(error)
    except (OSError, http.client.HTTPException) as error:
        return ReplayAnswer(0, connection_errors.reason(error).encode())


def _read(answer: Any) -> ReplayAnswer:
    body: bytes = answer.read(MAX_BODY_BYTES + 1)
    if len(body) > MAX_BODY_BYTES:
        return ReplayAnswer(0, f"its response is larger than {MAX_BODY_BYTES} bytes".encode())
    return ReplayAnswer(int(answer.status), body)


def _parse(body: bytes) -> Any:
    """Parse JSON; None if it is not JSON. Both servers may write NaN and Infinity as bare words."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _excerpt(body: bytes) -> str:
    return " ".join(body[:400].decode(errors="replace").split())[:200]
