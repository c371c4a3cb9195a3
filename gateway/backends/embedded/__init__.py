"""Backends with a runtime in this process. ``embedded_backend`` is common to all of them."""
