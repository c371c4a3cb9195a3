"""Every error that may reach a caller, with one neutral code each; protocols translate the code.

    ModelportError
    ├── InvalidArgument      the request is wrong: name the input and the remedy
    ├── NotFound             no such model, version or route
    ├── AlreadyExists        a version that is published is never overwritten
    ├── Unsupported          a feature, format or type this build does not have
    │   └── Decoupled        one answer is asked of a model that gives any number
    ├── Unavailable          not ready, queue full, shutting down: try again
    │   ├── TimedOut         the request's deadline passed
    │   ├── QueueFull        the queue of the model version is full
    │   └── MemoryExhausted  requests hold all the memory that they may
    ├── Cancelled            nobody waits for the answer
    └── Internal             our fault; the message is public, the cause is logged
        └── IntegrityError   an artifact is not what its manifest says

Messages are public: they hold no path, class or host name of the serving machine. A foreign
exception crosses into this tree once, where it is caught, with ``raise ... from``.
"""

from __future__ import annotations

from enum import Enum

MAX_MESSAGE = 2000


class Code(Enum):
    """The neutral codes. OIP's HTTP and gRPC statuses are derived from them in ``protocols/``."""

    INVALID_ARGUMENT = "invalid argument"
    NOT_FOUND = "not found"
    ALREADY_EXISTS = "already exists"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class ModelportError(Exception):
    """Root of the tree. ``str(error)`` is the public message."""

    code = Code.INTERNAL

    def __init__(self, message: str = "") -> None:
        # A message may quote a file name that is no text, or a name of a megabyte.
        message = message.encode("utf-8", "backslashreplace").decode()
        super().__init__(message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "...")

    @property
    def message(self) -> str:
        return str(self)


class InvalidArgument(ModelportError):
    code = Code.INVALID_ARGUMENT


class NotFound(ModelportError):
    code = Code.NOT_FOUND


class AlreadyExists(ModelportError):
    code = Code.ALREADY_EXISTS


class Unsupported(ModelportError):
    code = Code.UNSUPPORTED


class Decoupled(Unsupported):
    """Triton's words for it name the protocol; these are for protocols that Triton lacks."""

    def __init__(
        self,
        message: str = "this request doesn't support models with decoupled transaction policy; "
        "use ModelStreamInfer, or generate_stream over HTTP",
    ) -> None:
        super().__init__(message)


class Unavailable(ModelportError):
    code = Code.UNAVAILABLE


class TimedOut(Unavailable):
    """Triton answers 503 / UNAVAILABLE with this text, and clients match on it."""

    def __init__(self, message: str = "Request timeout expired") -> None:
        super().__init__(message)


class QueueFull(Unavailable):
    """Triton answers 503 / UNAVAILABLE with this text, and clients match on it."""

    def __init__(self, message: str = "Exceeds maximum queue size") -> None:
        super().__init__(message)


class MemoryExhausted(Unavailable):
    def __init__(
        self,
        message: str = "requests hold all the memory that they may; try again, or raise "
        "--max-request-memory",
    ) -> None:
        super().__init__(message)


class Cancelled(ModelportError):
    code = Code.CANCELLED


class Internal(ModelportError):
    code = Code.INTERNAL


class IntegrityError(Internal):
    """An artifact, manifest or configuration is not what it claims to be."""
