"""Clients for other servers: endpoint pools with outlier detection, HTTP and gRPC.

    pool = EndpointPool(model_name, endpoints, probe, timeout_seconds=..., ...)
    await pool.start()
    answer = await pool.call(lambda endpoint, limit: ..., deadline)

An attempt raises ``EndpointFailed`` for a fault of the endpoint, and ``ModelportError`` for one of
the request. ``gateway.upstream.grpc`` and ``gateway.upstream.http`` raise both.
"""

from modelport.gateway.upstream.messages import public
from modelport.gateway.upstream.outlier_detection import (
    IDEMPOTENT,
    NOT_PROCESSED,
    Endpoint,
    EndpointFailed,
    FailureKind,
    ServerError,
)
from modelport.gateway.upstream.pool import EndpointPool, on_loop

__all__ = [
    "IDEMPOTENT",
    "NOT_PROCESSED",
    "Endpoint",
    "EndpointFailed",
    "EndpointPool",
    "FailureKind",
    "ServerError",
    "on_loop",
    "public",
]
