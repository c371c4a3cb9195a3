"""The module that models of Triton's Python backend import, usually as ``pb_utils``.

    import triton_python_backend_utils as pb_utils

It needs numpy alone, so a model can be imported and tested without a server: ``InferenceRequest``
and ``Tensor`` make a request, and ``execute`` returns the responses.
"""

from __future__ import annotations

import json as json
import struct as struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from triton_python_backend_utils._errors import TritonError, TritonModelException
from triton_python_backend_utils._in_triton import give_way
from triton_python_backend_utils._logger import Logger, LogLevel
from triton_python_backend_utils._metrics import Metric, MetricFamily
from triton_python_backend_utils._model_config import ModelConfig
from triton_python_backend_utils._requests import (
    FLAG_SEQUENCE_END,
    FLAG_SEQUENCE_START,
    MEMORY_CPU,
    MEMORY_GPU,
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceTrace,
    PreferredMemory,
)
from triton_python_backend_utils._runtime import Current
from triton_python_backend_utils._tensors import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = FLAG_SEQUENCE_START
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = FLAG_SEQUENCE_END
TRITONSERVER_RESPONSE_COMPLETE_FINAL = RESPONSE_COMPLETE_FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = TRITONSERVER_REQUEST_RESCHEDULE = RELEASE_RESCHEDULE
TRITONSERVER_MEMORY_GPU = MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MEMORY_CPU

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_REQUEST_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceTrace",
    "LogLevel",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "np",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input called ``name``; None: the request has none."""
    return _named(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output called ``name``; None: the response has none."""
    return _named(inference_response.output_tensors(), name)


def _named(tensors: Sequence[Tensor], name: str) -> Tensor | None:
    for tensor in tensors:
        if tensor._name == name:
            return tensor
    return None


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """The declaration of an input in the dictionary ``model_config``; None: there is none."""
    return _declared(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """The declaration of an output in the dictionary ``model_config``; None: there is none."""
    return _declared(model_config, "output", name)


def _declared(model_config: Mapping[str, Any], kind: str, name: str) -> Any:
    return next((each for each in model_config.get(kind, ()) if each["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether the dictionary ``model_config`` is of a decoupled model."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def get_model_dir() -> str:
    """The folder of the model's version."""
    return Current.runtime.model_dir


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model of the repository, with the JSON ``config`` in place of its own.

    Args:
        files: in place of those of the repository, by ``file:`` and their path in its folder; they
            need a ``config``.

    Raises:
        TritonModelException: it does not load, or the server does not load models on request.
    """
    rows, contents = [], []
    for key, content in (files or {}).items():
        if not key.startswith("file:"):
            raise TritonModelException(f"Failed to load model: '{key}' does not begin with 'file:'")
        rows.append([key.removeprefix("file:"), len(content)])
        contents.append(content)
    content = b"".join(contents)
    Current.runtime.control("load", content, model=model_name, config=config, files=rows)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; an unknown one is no error."""
    Current.runtime.control("unload", model=model_name, dependents=unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model, or one version of it, answers requests."""
    return bool(Current.runtime.control("ready", model=model_name, version=model_version))


# The names of Triton's classes, which are in the texts of errors.
for _class in (InferenceRequest, InferenceResponse, PreferredMemory, Tensor, TritonError):
    _class.__module__ = "c_python_backend_utils"
give_way(__name__)
