"""Triton's own module in Triton's own processes, which may find this package before it."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_STUB = "triton_python_backend_stub"
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def give_way(name: str, program: str = "/proc/self/exe") -> None:
    """In Triton's stub, put its module, which is further on in ``sys.path``, in this one's place.

    The stub adds functions of its own to the module.
    """
    try:
        if os.path.basename(os.readlink(program)) != _STUB:
            return
    except OSError:
        return
    others = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = PathFinder.find_spec(name, others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
