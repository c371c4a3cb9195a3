"""Export a trained model, prove the artifact, serve it, measure it and roll it out.

    import modelport

    modelport.export("fraud.pt", model="fraud", repository="models")
    modelport.verify("models/fraud")
    with modelport.Server("models") as server, modelport.Client(server.http_url) as client:
        scores = client.infer("fraud", {"transactions": array})["score"]

Every error that the functions raise is a ``ModelportError``. Importing the package imports no
library: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelport import testing as testing
    from modelport.client import AsyncClient as AsyncClient
    from modelport.client import Client as Client
    from modelport.client_models import DurationStatistics as DurationStatistics
    from modelport.client_models import ModelDescription as ModelDescription
    from modelport.client_models import ModelStatistics as ModelStatistics
    from modelport.client_models import ModelStatus as ModelStatus
    from modelport.client_models import TensorDescription as TensorDescription
    from modelport.exporters.api import ExportResult as ExportResult
    from modelport.exporters.api import Verification as Verification
    from modelport.exporters.api import convert as convert
    from modelport.exporters.api import export as export
    from modelport.exporters.api import verify as verify
    from modelport.gateway.errors import AlreadyExists as AlreadyExists
    from modelport.gateway.errors import IntegrityError as IntegrityError
    from modelport.gateway.errors import InvalidArgument as InvalidArgument
    from modelport.gateway.errors import ModelportError as ModelportError
    from modelport.gateway.errors import NotFound as NotFound
    from modelport.gateway.errors import TimedOut as TimedOut
    from modelport.gateway.errors import Unavailable as Unavailable
    from modelport.gateway.errors import Unsupported as Unsupported
    from modelport.predictions import PredictedFile as PredictedFile
    from modelport.predictions import predict as predict
    from modelport.python_calls import infer as infer
    from modelport.python_calls import infer_async as infer_async
    from modelport.python_calls import infer_stream as infer_stream
    from modelport.python_models import model as model
    from modelport.server import Server as Server
    from modelport.server import serve as serve
    from modelport.tensor_types import Array as Array

__version__ = "0.1.0"

#: The module of each public name.
_MODULES = {
    **dict.fromkeys(("AsyncClient", "Client"), "modelport.client"),
    **dict.fromkeys(
        (
            *("DurationStatistics", "ModelDescription", "ModelStatistics", "ModelStatus"),
            "TensorDescription",
        ),
        "modelport.client_models",
    ),
    **dict.fromkeys(
        ("ExportResult", "Verification", "convert", "export", "verify"), "modelport.exporters.api"
    ),
    **dict.fromkeys(
        (
            *("AlreadyExists", "IntegrityError", "InvalidArgument", "ModelportError", "NotFound"),
            *("TimedOut", "Unavailable", "Unsupported"),
        ),
        "modelport.gateway.errors",
    ),
    **dict.fromkeys(("infer", "infer_async", "infer_stream"), "modelport.python_calls"),
    "model": "modelport.python_models",
    "PredictedFile": "modelport.gateway.batch_prediction.batch_run",
    "predict": "modelport.predictions",
    "Array": "modelport.tensor_types",
    **dict.fromkeys(("Server", "serve"), "modelport.server"),
}

__all__ = [
    "AlreadyExists",
    "Array",
    "AsyncClient",
    "Client",
    "DurationStatistics",
    "ExportResult",
    "IntegrityError",
    "InvalidArgument",
    "ModelDescription",
    "ModelStatistics",
    "ModelStatus",
    "ModelportError",
    "NotFound",
    "PredictedFile",
    "Server",
    "TensorDescription",
    "TimedOut",
    "Unavailable",
    "Unsupported",
    "Verification",
    "__version__",
    "convert",
    "export",
    "infer",
    "infer_async",
    "infer_stream",
    "model",
    "predict",
    "serve",
    "testing",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("modelport.testing")
    if name not in _MODULES:
        raise AttributeError(f"module 'modelport' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
