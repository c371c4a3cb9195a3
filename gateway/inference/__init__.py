"""The path of a request from its decoding to the backend."""
