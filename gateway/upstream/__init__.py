"""Other servers as seen from a backend: endpoints, what becomes of them, and the two transports.

    pool = EndpointPool(model_name, endpoints, probe, timeout_seconds=..., ...)
    await pool.start()
    answer = await pool.call(lambda endpoint, limit: ..., deadline)

An attempt raises ``EndpointFailed`` for what is the endpoint's fault, and ``ModelportError`` for
what is the request's. ``gateway.upstream.grpc`` and ``gateway.upstream.http`` raise both already.
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
