"""The server of HTTP/2, for gRPC and for HTTP."""
