"""modelport's gateway: one model repository, every protocol, any backend (``gateway.server``)."""

__version__ = "0.1.0"
