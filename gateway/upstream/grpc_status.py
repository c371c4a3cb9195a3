"""The meaning of a gRPC status, and of a message, with which another server answers."""

from __future__ import annotations

import re

from modelport.gateway.errors import (
    Internal,
    InvalidArgument,
    ModelportError,
    QueueFull,
    TimedOut,
    Unsupported,
)
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind, ServerError

#: By number, https://github.com/grpc/grpc/blob/master/doc/statuscodes.md
_NAMES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
    "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
    "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
STATUSES = {str(number): name for number, name in enumerate(_NAMES)}
_SERVER = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})
_REQUEST = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION", "ALREADY_EXISTS"})
#: What ``public`` leaves out, and the length of the rest. An IPv6 address has at least two colons;
#: ``[1]`` and ``[-1,4]`` are shapes.
_FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s\"':/]++/)++")
_ADDRESSES = re.compile(
    r"(?:ipv[46]:)?(?:\[[0-9a-f.]*+:[0-9a-f.]*+:[0-9a-f:.]*+(?:%\w++)?\]"
    r"|(?<!\d)\d++(?:\.\d++){3})(?::\d++)?"
)
MAX_REASON = 500
#: What is searched of a message: what is left out does not count for its length.
SEARCHED_CHARACTERS = 4 * MAX_REASON


def public(text: str) -> str:
    """The first line of another server's message, without folders and addresses."""
    lines = text[:SEARCHED_CHARACTERS].strip().splitlines() or [""]
    return _ADDRESSES.sub("the server", _FOLDERS.sub("", lines[0]))[:MAX_REASON]


def meant(status: str, message: str) -> EndpointFailed | ModelportError:
    """Convert ``status``, the name of a server's gRPC status, into an error.

    ``NOT_FOUND`` is no fault of the request: the gateway has checked it, so the server lacks what
    it should serve.
    """
    message = public(message)
    if status in _REQUEST:
        return InvalidArgument(message)
    if status == "UNIMPLEMENTED":
        return Unsupported(message)
    if status == "RESOURCE_EXHAUSTED":
        return QueueFull()
    if status == "DEADLINE_EXCEEDED":
        return TimedOut()
    if status == "NOT_FOUND":
        return EndpointFailed(FailureKind.MISSING, message)
    if status in ("UNAVAILABLE", "CANCELLED"):
        lowered = message.lower()
        if "maximum queue size" in lowered:
            return QueueFull()
        if "timeout expired" in lowered:
            return TimedOut()
        return EndpointFailed(FailureKind.UNREADY, message)
    message = message or "the server that runs the model stated no reason"
    return ServerError(message) if status in _SERVER else Internal(message)
