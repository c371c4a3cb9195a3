"""Backends with a server that the gateway starts and supervises; the clients are in ``remote``."""
