"""Backends: each turns a version on disk into an ``Infer``. Found by the config's backend name."""

from __future__ import annotations

from importlib import import_module

import structlog

from gateway.backends.base import Load
from gateway.errors import Unsupported

log = structlog.get_logger("modelport.backends")

#: backend name → module; imported when the first model that needs it loads.
MODULES = {"onnxruntime": "gateway.backends.onnxruntime", "fake": "gateway.backends.fake"}


def find(backend: str) -> Load:
    """The loader of ``backend``.

    Raises:
        Unsupported: no such backend, or its library is not installed.
    """
    if backend not in MODULES:
        raise Unsupported(
            f"backend '{backend}' is not supported; this gateway has: {', '.join(sorted(MODULES))}"
        )
    try:
        load: Load = import_module(MODULES[backend]).load
    except ImportError as error:
        log.error("a backend cannot be imported", backend=backend, error=str(error))
        raise Unsupported(
            f"backend '{backend}' cannot be imported here; install modelport again, the server's "
            "log has the reason"
        ) from error
    return load
