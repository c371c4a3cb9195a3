"""What every front of the gRPC methods does alike: a request's bytes, and an error's status."""

from __future__ import annotations

from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from gateway.errors import Code, InvalidArgument, ModelportError, TimedOut
from gateway.protocols.grpc_method import Method

log = structlog.get_logger("modelport.front")

#: gRPC's own default is 4 MB; Triton's limit, and protobuf's, is 2 GiB.
MAX_GRPC_MESSAGE_BYTES = 2**31 - 1
#: A timeout this close to the call's deadline is that deadline.
CLOCK_SECONDS = 0.05

STATUS = {
    Code.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Code.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Code.CANCELLED: grpc.StatusCode.CANCELLED,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}


def parse(method: Method, content: bytes | memoryview) -> Any:
    """The message in ``content``.

    Raises:
        InvalidArgument: it is none.
    """
    try:
        return method.request.FromString(content)
    except DecodeError as error:
        raise InvalidArgument(
            f"the request is not a valid {method.request.DESCRIPTOR.name} message"
        ) from error


def status(
    method: Method, error: ModelportError, remaining_seconds: float | None
) -> grpc.StatusCode:
    """The status of ``error``, with so much left until the call's own deadline."""
    named = method.statuses.get(type(error))
    found = grpc.StatusCode[named] if named else STATUS[error.code]
    late = remaining_seconds is not None and remaining_seconds < CLOCK_SECONDS
    if late and isinstance(error, TimedOut):
        found = grpc.StatusCode.DEADLINE_EXCEEDED  # as the client's own clock says
    log.debug("rpc failed", status=found.name, error=str(error))
    return found
