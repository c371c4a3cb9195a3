"""Servers that the gateway starts and keeps running; their clients are in ``remote``."""
