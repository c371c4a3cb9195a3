"""The server: ports, HTTP/1.1, HTTP/2 and gRPC connections, worker processes, start and drain.

``time_limits`` has every limit in time of a connection, ``http1.connection`` and
``wire.http2.abuse_limits`` those of its size and number.
"""
