"""The server of gRPC over HTTP/2."""
