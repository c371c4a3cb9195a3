"""The start of a worker's interpreter, which runs this file by its path and knows no modelport.

Arguments: the socket's descriptor, the gateway's process id, the folder of
``triton_python_backend_utils``, which has that of ``modelport`` beside it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _die_with(parent: int) -> None:
    """End when the gateway's thread that started this process ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the signal was set
            os._exit(1)


def _package(name: str, folder: str) -> None:
    """Import a package by its folder, whose neighbours stay unknown."""
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _, descriptor, parent, utilities = sys.argv
    sys.argv = [""]  # as in Triton: unittest.main() in a model reads it
    _die_with(int(parent))
    # A service manager sends these to every process of the gateway, which decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _package("triton_python_backend_utils", utilities)
    _package("modelport", os.path.join(os.path.dirname(utilities), "modelport"))
    _package("modelport_python_worker", os.path.dirname(os.path.abspath(__file__)))
    importlib.import_module("modelport_python_worker.main").main(int(descriptor))
