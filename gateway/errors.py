"""Exception hierarchy of the gateway. Protocols translate each class's code to a status.

    ModelportError
    ├── InvalidArgument      the request is invalid
    │   └── UsageError       an argument of a command or function is wrong
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
import re
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
    UNKNOWN = "unknown"
    INTERNAL = "internal"


class ModelportError(Exception):
    """Base class of all errors. ``str(error)`` is the public message."""

    code = Code.INTERNAL
    #: The exit code of a command.
    exit_code = 1
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
    exit_code = 2


class UsageError(InvalidArgument):
    """The command was called wrongly; the message names the argument and the remedy."""


class NotFound(ModelportError):
    """There is no such model, version or route."""

    code = Code.NOT_FOUND
    exit_code = 2


class AlreadyExists(ModelportError):
    """A published version is never overwritten."""

    code = Code.ALREADY_EXISTS
    exit_code = 2


class Unsupported(ModelportError):
    """The feature, format or type is not available."""

    code = Code.UNSUPPORTED
    exit_code = 4


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

    def __init__(
        self,
        retry_after_seconds: float,
        message: str = "the quota is exhausted",
        unit: str = "requests",
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        #: What there were too many of: requests, bytes or tokens.
        self.unit = unit


class Cancelled(ModelportError):
    """The client has disconnected."""

    code = Code.CANCELLED


class Unknown(ModelportError):
    """A model has answered with an error of no kind."""

    code = Code.UNKNOWN


class Internal(ModelportError):
    """The server has failed."""

    code = Code.INTERNAL


class IntegrityError(Internal):
    """An artifact does not match its manifest, or its configuration."""

    exit_code = 5


def closest(wrong: str, known: Iterable[str]) -> str:
    """The name of ``known`` that ``wrong`` most likely means; empty if none is similar."""
    by_folded = {name.casefold(): name for name in known}
    found = difflib.get_close_matches(wrong.casefold(), by_folded, n=1)
    return by_folded[found[0]] if found else ""


def suggestion(wrong: str, known: Iterable[str], before: str = "") -> str:
    """A question with the name that ``wrong`` most likely means, after ``before``; else empty."""
    found = closest(wrong, known)
    return f"{before}did you mean '{found}'?" if found else ""


#: First lines of TensorFlow and TorchScript that only announce the reason.
_ANNOUNCEMENTS = ("Graph execution error:", "The following operation failed in the TorchScript")
#: The place of a failure, around the reason.
_PLACES = re.compile(r"\s|Detected at node |<stack traces|Traceback|\[\[|File ")
#: "builtins.RuntimeError: " before the message of a TorchScript operator.
_CLASS = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception): ")


def reason_of(error: BaseException) -> str:
    """The line of a library's message that has the reason; empty if none has."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines or not lines[0].startswith(_ANNOUNCEMENTS):
        return lines[0].strip() if lines else ""
    told = [line for line in lines[1:] if not _PLACES.match(line)]
    if not told:
        return ""
    # TensorFlow gives the reason first, TorchScript last, behind the code that failed.
    return _CLASS.sub("", told[0 if lines[0].startswith(_ANNOUNCEMENTS[0]) else -1])


#: A message may quote a name of the model, as long as its author likes.
SEARCHED_CHARACTERS = 1000
_ONNX_RUNTIME = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : \w+ : |/\S+\.(?:cc|h):\d+ [^()]*\([^()]*\) ?"
    r"|Load model from .*?\.onnx failed: ?"
)


def first_line(error: Exception, most: int = 200) -> str:
    """The line of a library's message with the reason; without a message, the error's type.

    ONNX Runtime's prefix and source files are left out, and its indices, which follow on lines of
    their own, are kept.
    """
    lines = str(error).strip().splitlines()
    if lines and lines[0].startswith("[ONNXRuntimeError]"):
        said = " ".join(line.strip() for line in lines if "Please fix either" not in line)
        return _ONNX_RUNTIME.sub("", said[:SEARCHED_CHARACTERS])[:most]
    return (reason_of(error) or type(error).__name__)[:most]


def plain_reason(error: BaseException) -> str:
    """The reason in an error of the system or of a library, without numbers, sources and classes.

    ``[Errno 28] No space left on device: '/x'`` becomes ``No space left on device``.
    """
    if isinstance(error, OSError):
        # OpenSSL's: "[X509] PEM lib (_ssl.c:4149)", with the reason as PEM_LIB
        named = getattr(error, "reason", None)
        if isinstance(named, str):
            return named.replace("_", " ").lower()
        if error.strerror:
            return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
