"""Starts an Envoy process with the gateway's application in it. Nothing here imports pyvoy.

pyvoy is a module that Envoy loads, and which embeds Python; the interpreter's own library is
preloaded, for the module is built as an extension is, without it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from gateway.errors import Unavailable, Unsupported
from gateway.front.envoy import configuration as envoy_configuration
from gateway.front.envoy.environment import Environment
from gateway.settings import Settings

_ABI3 = ".abi3.so"
_PRELOAD = "DYLD_INSERT_LIBRARIES" if sys.platform == "darwin" else "LD_PRELOAD"
_LOG_LEVEL = "error"
#: A Unix socket's path is a field of 108 bytes, its end included.
_MAX_SOCKET_PATH = 107


def problem() -> str:
    """Why Envoy cannot run here, and the remedy, in a line; empty if it can."""
    if _module() is None or _envoy() is None:
        return "Envoy is not installed here; install it with: pip install pyvoy==1.3.0"
    if _libpython() is None:
        return (
            "this Python has no shared library (libpython), which Envoy needs; use one built with "
            "--enable-shared, or on Debian install libpython3-dev"
        )
    return ""


def configuration(settings: Settings, folder: Path, application: str) -> str:
    """Envoy's configuration as ``command`` writes it: JSON."""
    module = _module() or Path(f"pyvoy/_pyvoy{_ABI3}")
    admin = admin_path(folder)
    return envoy_configuration.text(
        envoy_configuration.bootstrap(settings, admin, module, application)
    )


def command(settings: Settings, folder: Path, application: str) -> tuple[list[str], dict[str, str]]:
    """The command line of one Envoy process, and what it needs besides this environment.

    ``settings`` name the ports really used: they are bound with ``SO_REUSEPORT`` by whoever
    reserves them. ``folder`` is private to the process. ``application`` is the ASGI application
    that Envoy's Python imports, ``module:attribute``, with this Python's search path.

    Raises:
        Unsupported: ``problem`` has something to say.
        Unavailable: the folder's path is too long for a socket in it.
        OSError: the configuration cannot be written.
    """
    if found := problem():
        raise Unsupported(found)
    admin = admin_path(folder)
    if len(os.fsencode(admin)) > _MAX_SOCKET_PATH:
        raise Unavailable(f"the path {folder} is too long for a Unix socket in it; shorten TMPDIR")
    bootstrap = folder / "envoy.json"
    bootstrap.write_text(configuration(settings, folder, application))
    argv = [
        *(str(_envoy()), "--config-path", str(bootstrap)),
        *("--concurrency", "1", "--disable-hot-restart", "--log-level", _LOG_LEVEL),
    ]
    return argv, _environment(admin)


def admin_path(folder: Path) -> Path:
    """Where the administration's Unix socket is."""
    return folder / "admin.sock"


def _environment(admin: Path) -> dict[str, str]:
    preload = [str(_libpython()), *filter(None, [os.environ.get(_PRELOAD)])]
    variables = {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONHOME": f"{sys.prefix}{os.pathsep}{sys.exec_prefix}",
        _PRELOAD: os.pathsep.join(preload),
    }
    before = {name: os.environ.get(name) for name in variables}
    return {**variables, **Environment(str(admin), sys.executable, before).variables()}


def _module() -> Path | None:
    """pyvoy's shared library."""
    package = _package("pyvoy")
    names = [f"_pyvoy{suffix}" for suffix in (_ABI3, *EXTENSION_SUFFIXES)]
    return next((package / n for n in names if (package / n).is_file()), None) if package else None


def _envoy() -> Path | None:
    package = _package("envoy")
    program = package / "_bin" / "envoy" if package else None
    return program if program and os.access(program, os.X_OK) else None


def _package(name: str) -> Path | None:
    """Where a package is, without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _libpython() -> Path | None:
    """The library by its link's name, which on macOS tells it from a framework's."""
    try:
        from find_libpython import candidate_paths
    except ImportError:
        return None
    paths = map(Path, candidate_paths())
    return next((p for p in paths if p.name.startswith("libpython") and p.exists()), None)
