"""Clients for other servers: endpoint pools with outlier detection, HTTP and gRPC.

    pool = EndpointPool(model_name, endpoints, probe, timeout_seconds=..., ...)
    await pool.start()
    answer = await pool.call(lambda endpoint, limit: ..., deadline)

An attempt raises ``EndpointFailed`` for a fault of the endpoint, and ``ModelportError`` for one of
the request. ``gateway.upstream.grpc`` and ``gateway.upstream.http`` raise both.
"""
