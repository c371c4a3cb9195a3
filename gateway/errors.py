"""Exception hierarchy of the gateway. Protocols translate each class's code to a status.

    ModelportError
    ├── InvalidArgument      the request is invalid
    ├── NotFound             no such model, version or route
    ├── AlreadyExists        a published version is never overwritten
    ├── Unsupported          a feature, format or type that is not available
    │   └── Decoupled        a single response was requested of a decoupled model
    ├── Unavailable          not ready, queue full, shutting down: the client may retry
    │   ├── TimedOut         the request's deadline has passed
    │   ├── QueueFull        the queue of the model version is full
    │   └── MemoryExhausted  the memory budget for requests is exhausted
    ├── Unauthenticated      the credential is missing, wrong or expired
    ├── PermissionDenied     the caller may not do this
    ├── QuotaExceeded        the caller has used up its quota
    ├── Cancelled            the client has gone
    └── Internal             a defect of the server; the cause is logged
        └── IntegrityError   an artifact does not match its manifest

Messages are public: they name the input and the remedy, but no path, class or host name of the
server. Foreign exceptions are translated once, where they are caught, with ``raise ... from``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum

MAX_MESSAGE = 2000


class Code(Enum):
    """Error codes; ``protocols/`` maps them to HTTP and gRPC statuses."""

    INVALID_ARGUMENT = "invalid argument"
    NOT_FOUND = "not found"
    ALREADY_EXISTS = "already exists"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission denied"
    QUOTA_EXCEEDED = "quota exceeded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class ModelportError(Exception):
    """Base class of all errors. ``str(error)`` is the public message."""

    code = Code.INTERNAL
    default_message = ""

    def __init__(self, message: str = "") -> None:
        # A message may quote a name that is not valid Unicode, or very long.
        message = (
            (message or self.default_message)[: MAX_MESSAGE + 1]
            .encode("utf-8", "backslashreplace")
            .decode()
        )
        super().__init__(message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "...")

    @property
    def message(self) -> str:
        return str(self)


class InvalidArgument(ModelportError):
    """The request is invalid."""

    code = Code.INVALID_ARGUMENT


class NotFound(ModelportError):
    """There is no such model, version or route."""

    code = Code.NOT_FOUND


class AlreadyExists(ModelportError):
    """A published version is never overwritten."""

    code = Code.ALREADY_EXISTS


class Unsupported(ModelportError):
    """The feature, format or type is not available."""

    code = Code.UNSUPPORTED


class Decoupled(Unsupported):
    """A single response was requested of a decoupled model.

    The default message is for protocols that Triton does not have.
    """

    default_message = (
        "this request doesn't support models with decoupled transaction policy; use "
        "ModelStreamInfer, or generate_stream over HTTP"
    )


class Unavailable(ModelportError):
    """The server cannot serve the request now; the client may retry."""

    code = Code.UNAVAILABLE


class TimedOut(Unavailable):
    """The deadline has passed. Clients match on this text of Triton's."""

    default_message = "Request timeout expired"


class QueueFull(Unavailable):
    """The queue is full. Clients match on this text of Triton's."""

    default_message = "Exceeds maximum queue size"


class MemoryExhausted(Unavailable):
    """The memory budget for requests and responses is exhausted."""

    default_message = (
        "requests use all the memory that they may; try again, or raise --max-request-memory"
    )


class Unauthenticated(ModelportError):
    """The request's credential is missing, wrong or expired."""

    code = Code.UNAUTHENTICATED


class PermissionDenied(ModelportError):
    """The caller may not do this, to any model."""

    code = Code.PERMISSION_DENIED


class QuotaExceeded(ModelportError):
    """The caller has used up its quota; it may retry after ``retry_after_seconds``."""

    code = Code.QUOTA_EXCEEDED

    def __init__(self, retry_after_seconds: float, message: str = "the quota is exhausted") -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Cancelled(ModelportError):
    """The client has disconnected."""

    code = Code.CANCELLED


class Internal(ModelportError):
    """The server has failed."""

    code = Code.INTERNAL


class IntegrityError(Internal):
    """An artifact does not match its manifest, or its configuration."""


def closest(wrong: str, known: Iterable[str]) -> str:
    """The name of ``known`` that ``wrong`` most likely means; empty if none is similar."""
    by_folded = {name.casefold(): name for name in known}
    found = difflib.get_close_matches(wrong.casefold(), by_folded, n=1)
    return by_folded[found[0]] if found else ""


def install_extra(extra: str) -> str:
    """The instruction that installs an extra: from the sources, since no package index has them."""
    return f"pip install '.[{extra}]' in modelport's checkout"
