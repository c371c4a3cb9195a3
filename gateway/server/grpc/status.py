"""The status codes of gRPC, and those of this gateway's errors.

https://github.com/grpc/grpc/blob/master/doc/statuscodes.md
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import structlog
from google.protobuf.message import DecodeError, Message

from modelport.gateway.errors import (
    Code,
    InvalidArgument,
    MemoryExhausted,
    ModelportError,
    TimedOut,
)
from modelport.gateway.protocols.grpc_method import Method
from modelport.gateway.runtime import offload
from modelport.gateway.wire import incremental_protobuf

log = structlog.get_logger("modelport.grpc")

#: A timeout this close to the call's deadline is that deadline.
CLOCK_SECONDS = 0.05


class StatusCode(IntEnum):
    """The codes of gRPC, by their numbers on the wire."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


_OTHER_NAMES = {"UNSUPPORTED": "UNIMPLEMENTED", "QUOTA_EXCEEDED": "RESOURCE_EXHAUSTED"}
#: The other errors have gRPC's names.
OF_ERRORS = {code: StatusCode[_OTHER_NAMES.get(code.name, code.name)] for code in Code}


def parse(method: Method, content: bytes | memoryview) -> Any:
    """The message in ``content``.

    Raises:
        InvalidArgument: it is not one.
    """
    try:
        request, large = method.request, len(content) > offload.INLINE_BYTES
        if large and isinstance(request, type) and issubclass(request, Message):
            return incremental_protobuf.parse(request, content)
        return request.FromString(content)  # others know how large messages are read
    except DecodeError as error:
        raise InvalidArgument(
            f"the request is not a valid {method.request.DESCRIPTOR.name} message"
        ) from error


def is_late(error: ModelportError, remaining_seconds: float | None) -> bool:
    """Whether ``error`` is the end of the call's own deadline, with so much left until it."""
    late = remaining_seconds is not None and remaining_seconds < CLOCK_SECONDS
    return late and isinstance(error, TimedOut)


def status(method: Method, error: ModelportError) -> StatusCode:
    """The status of ``error``."""
    named = method.statuses.get(type(error))
    found = StatusCode[named] if named else OF_ERRORS[error.code]
    if isinstance(error, MemoryExhausted):
        found = StatusCode.RESOURCE_EXHAUSTED  # in every dialect, as gRPC's own limits
    log.debug("rpc failed", status=found.name, error=str(error))
    return found
