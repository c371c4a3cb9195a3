"""Time limits of the connections of clients: HTTP/1.1, HTTP/2 and gRPC."""

from __future__ import annotations

from modelport.gateway.wire.http2 import connection as http2

#: The longest time for the head of a request, or, over HTTP/2, for one frame.
HEAD_SECONDS = http2.HEAD_SECONDS
#: The same on an HTTP/1.1 connection that was accepted for health checks only.
CROWDED_SECONDS = 1.0
#: The longest pause within a body.
BODY_IDLE_SECONDS = 30.0
#: The longest time without a request. nginx's default: a client that reuses a connection while it
#: is being closed sees an error.
KEEP_ALIVE_SECONDS = 75.0
#: The longest time in which a client reads nothing of what is sent to it.
UNREAD_SECONDS = 75.0
#: The time that a client has to read the last bytes before its connection is aborted.
LINGER_SECONDS = http2.LINGER_SECONDS
#: The longest time that a client may leave what is sent to it unacknowledged.
DEAD_PEER_SECONDS = 60
#: The interval of the checks of an HTTP/2 connection against these limits.
CHECK_SECONDS = 1.0
#: The interval of the checks whether a client that has half-closed is still there.
PROBE_SECONDS = 0.1
