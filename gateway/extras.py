"""The extras of the package, and the libraries that each installs."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from modelport.gateway.errors import Unsupported

#: Package → the extra that installs it; all others are in ``torch``.
_EXTRAS = {
    "tensorflow": "tensorflow",
    "keras": "tensorflow",
    "tf2onnx": "tensorflow",
    "h5py": "tensorflow",
    "ai_edge_litert": "litert",
    "openvino": "openvino",
    "executorch": "executorch",
    **dict.fromkeys(("lightgbm", "onnxmltools", "skl2onnx", "skops", "xgboost"), "trees"),
    "transformers": "huggingface",
    "peft": "huggingface",
    "timm": "timm",
    "torchvision": "torchvision",
    "PIL": "images",
    "tokenizers": "text",
    "jwt": "jwt",
    "opentelemetry": "otel",
    "pyarrow": "parquet",
    **dict.fromkeys(
        (
            *("locust", "gevent", "geventhttpclient", "hdrh", "psutil", "scipy", "jinja2"),
            *("matplotlib", "rich", "tritonclient", "grpc"),
        ),
        "load",
    ),
}


#: Packages that an extra installs.
_LIBRARIES = frozenset(_EXTRAS) | {"torch", "onnx", "onnxscript", "safetensors", "sklearn"}


def install_extra(extra: str) -> str:
    """The instruction that installs an extra: from the sources, since no package index has them."""
    return f"pip install '.[{extra}]' in modelport's checkout"


def missing_extra(error: ImportError) -> Unsupported:
    """The message for a missing library of an extra."""
    package = (error.name or "").partition(".")[0]
    return Unsupported(
        f"'{package}' is not installed; this needs it: "
        f"{install_extra(_EXTRAS.get(package, 'torch'))}"
    )


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Raise ``Unsupported``, which names the extra, in place of the absence of a library."""
    try:
        yield
    except ImportError as error:
        if not is_library(error):
            raise
        raise missing_extra(error) from error


def require_extra(extra: str) -> None:
    """Raise ``Unsupported`` unless every package of ``extra`` is installed; import none."""
    for package in [name for name, brought_by in _EXTRAS.items() if brought_by == extra]:
        with contextlib.suppress(ValueError):  # a module without a specification, as None
            if importlib.util.find_spec(package) is not None:
                continue
        raise missing_extra(ModuleNotFoundError(name=package))


def is_library(error: ImportError) -> bool:
    """Whether the missing module belongs to a library, not to modelport or the user's code."""
    return (error.name or "").partition(".")[0] in _LIBRARIES
