"""Triton's protobuf messages from ``tritonclient``, without its gRPC client.

Importing ``tritonclient.grpc`` would import gRPC's library, which takes a third of the gateway's
start-up time. An empty module takes its place during the import of the messages; a later import of
the client works as usual and shares them.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import tritonclient

_PACKAGE = "tritonclient.grpc"


def _messages() -> tuple[Any, Any]:
    names = [f"{_PACKAGE}.{name}" for name in ("model_config_pb2", "service_pb2")]
    if _PACKAGE in sys.modules:
        config, service = map(importlib.import_module, names)
        return config, service
    bare = ModuleType(_PACKAGE)
    bare.__path__ = [str(Path(folder) / "grpc") for folder in tritonclient.__path__]
    sys.modules[_PACKAGE] = bare
    try:
        config, service = map(importlib.import_module, names)
    finally:
        if sys.modules.get(_PACKAGE) is bare:
            del sys.modules[_PACKAGE]
    return config, service


model_config_pb2, service_pb2 = _messages()
