"""Other servers as seen from a backend: endpoints, what becomes of them, and the two transports.

    pool = Pool(model_name, endpoints, probe, timeout_seconds=..., connect_timeout_seconds=...)
    await pool.start()
    answer = await pool.call(lambda endpoint, limit: ..., deadline)

An attempt raises ``EndpointFailed`` for what is the endpoint's fault, and ``ModelportError`` for
what is the request's. ``gateway.upstream.grpc`` and ``gateway.upstream.http`` raise both already.
"""

from gateway.upstream.pool import Endpoint, EndpointFailed, Failure, Pool, on_loop, public

__all__ = ["Endpoint", "EndpointFailed", "Failure", "Pool", "on_loop", "public"]
