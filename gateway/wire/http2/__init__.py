"""HTTP/2 (RFC 9113): one implementation for the server and the client."""
