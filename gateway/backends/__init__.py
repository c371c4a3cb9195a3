"""Backends: each turns a model version into an ``Infer``. Found by the backend's name.

To add one, write a module with ``load``, a ``base.BackendLoader``, and its descriptor: built in, in
``extensions.backend_descriptors``; in a package of its own, as entry point ``modelport.backends``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Awaitable, Callable
from importlib import import_module
from types import ModuleType

import structlog

from modelport.gateway.backends.base import BackendLoader
from modelport.gateway.errors import Unsupported
from modelport.gateway.extensions.backend_descriptors import BACKENDS
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.runtime import collector

log = structlog.get_logger("modelport.backends")

#: Concurrent imports of two runtimes may see each other partially imported.
_importing = threading.Lock()


#: The versions of a model that the route's server has READY, ascending.
Versions = Callable[[ModelRoute, str], Awaitable[list[int]]]


def find(backend: str) -> BackendLoader:
    """The loader of ``backend``.

    Raises:
        Unsupported: no such backend, or its library is not installed.
    """
    load: BackendLoader = _module(backend).load
    return load


def find_versions(backend: str) -> Versions:
    """The function that lists the versions on a remote server of ``backend``.

    Raises:
        Unsupported: there is no such backend, or it runs in this process.
    """
    versions: Versions | None = getattr(_module(backend), "versions", None)
    if versions is None:
        raise Unsupported(f"backend '{backend}' runs in the gateway: remove the route")
    return versions


def _module(backend: str) -> ModuleType:
    if backend == "python":
        raise Unsupported(
            "backend 'python' runs Python code, as only Triton does; give the model a route to a "
            "Triton server, or 'managed = true' to start one here"
        )
    descriptor = BACKENDS.get(backend)
    if descriptor is None:
        known = ", ".join(sorted(BACKENDS.names()))
        raise Unsupported(f"backend '{backend}' is not supported; this gateway has: {known}")
    try:
        with _importing:
            is_new = descriptor.module not in sys.modules
            module = import_module(descriptor.module)
            if is_new:
                collector.exempt_modules()
            return module
    except Exception as error:
        log.error("a backend cannot be imported", backend=backend, error=str(error))
        if isinstance(error, ImportError) and descriptor.libraries:
            raise Unsupported(
                f"backend '{backend}' needs a library that is not installed; install it: "
                f"{descriptor.libraries[0].install}"
            ) from error
        raise Unsupported(
            f"backend '{backend}' cannot be imported; install its package again, the server's log "
            "has the reason"
        ) from error
