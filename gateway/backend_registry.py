"""The backends: one descriptor each, for ``serve``, ``doctor``, ``package`` and ``compare``.

To add one, write a module with ``load``, a ``base.BackendLoader``, and a descriptor: here, or in a
package of its own, as entry point ``modelport.backends``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import structlog

from modelport.gateway.errors import Unsupported
from modelport.gateway.extensions import ExtensionTable
from modelport.gateway.extras import install_extra
from modelport.gateway.runtime import collector

if TYPE_CHECKING:
    from modelport.gateway.backends.base import BackendLoader
    from modelport.gateway.repository.routes_file import ModelRoute

log = structlog.get_logger("modelport.backends")

#: Concurrent imports of two runtimes may see each other partially imported.
_importing = threading.Lock()


class RemoteVersions(NamedTuple):
    """The versions of a model that a route's server has READY, ascending.

    ``loading``: the server is loading models, so that more versions may become READY.
    """

    numbers: list[int]
    loading: bool = False


Versions = Callable[["ModelRoute", str], Awaitable[RemoteVersions]]


class Platform(NamedTuple):
    """A format of artifacts: its names, and where an artifact lies in a version's folder.

    Attributes:
        format: the word of ``modelport export --format``.
        platform: Triton's word in ``config.pbtxt``; empty where Triton has none.
        backend: the backend that serves it.
        servers: the targets of ``modelport package`` that load it.
    """

    format: str
    platform: str
    backend: str
    default_filename: str
    servers: tuple[str, ...] = ()


class Library(NamedTuple):
    """A distribution with a runtime.

    Attributes:
        install: how to install it, as a command or in words.
        native: patterns of the files that an application without Python links instead.
        source: upstream's documentation of doing so.
    """

    distribution: str
    install: str
    native: tuple[str, ...] = ()
    source: str = ""


class BackendDescriptor(NamedTuple):
    """A backend.

    Attributes:
        name: the word ``backend`` in ``config.pbtxt``.
        module: has ``load``, a ``BackendLoader``; imported with the first model that needs it. A
            backend of other servers has ``versions`` as well.
        platforms: the formats that it serves in this process.
        libraries: the alternatives for its runtime, the recommended one first.
    """

    name: str
    module: str
    title: str
    platforms: tuple[Platform, ...] = ()
    libraries: tuple[Library, ...] = ()


_PACKAGE = "modelport.gateway.backends"
_BUILTIN = (
    BackendDescriptor(
        "onnxruntime",
        f"{_PACKAGE}.embedded.onnxruntime",
        "ONNX Runtime",
        (Platform("onnx", "onnxruntime_onnx", "onnxruntime", "model.onnx", ("triton",)),),
        (
            Library(
                "onnxruntime",
                "pip install onnxruntime",
                ("libonnxruntime.so*",),
                "https://onnxruntime.ai/docs/get-started/with-cpp.html",
            ),
        ),
    ),
    BackendDescriptor(
        "pytorch",
        f"{_PACKAGE}.embedded.pytorch",
        "PyTorch",
        (
            Platform(
                *("torchscript", "pytorch_libtorch", "pytorch", "model.pt"),
                servers=("torchserve", "triton"),
            ),
            Platform("aoti", "torch_aoti", "pytorch", "model.pt2"),
            Platform("pt2", "torch_export", "pytorch", "model.pt2"),  # Triton has no word for it
        ),
        (
            Library(
                "torch",
                install_extra("torch"),
                ("libtorch_cpu.so*", "libc10.so*", "libtorch.so*", "libgomp*.so*"),
                "https://docs.pytorch.org/cppdocs/installing.html",
            ),
        ),
    ),
    BackendDescriptor(
        "tensorflow",
        f"{_PACKAGE}.embedded.tensorflow",
        "TensorFlow",
        (
            Platform(
                *("savedmodel", "tensorflow_savedmodel", "tensorflow", "model.savedmodel"),
                servers=("tfserving", "triton"),
            ),
        ),
        (
            Library(
                "tensorflow",
                install_extra("tensorflow"),
                ("libtensorflow_cc.so*", "libtensorflow_framework.so*"),
                "https://www.tensorflow.org/install/lang_c",
            ),
        ),
    ),
    BackendDescriptor(
        "tflite",
        f"{_PACKAGE}.embedded.tflite",
        "LiteRT",
        (Platform("tflite", "", "tflite", "model.tflite"),),
        (
            Library(
                "ai-edge-litert",
                install_extra("litert"),
                ("libLiteRt.so*",),
                "https://ai.google.dev/edge/litert/inference",
            ),
            Library("tflite-runtime", "only if ai-edge-litert is not available"),
        ),
    ),
    BackendDescriptor(
        "openvino",
        f"{_PACKAGE}.embedded.openvino",
        "OpenVINO",
        (Platform("openvino", "", "openvino", "model.xml", ("triton",)),),
        (
            Library(
                "openvino",
                install_extra("openvino"),
                (
                    *("libopenvino.so*", "libopenvino_ir_frontend.so*"),
                    *("libopenvino_intel_cpu_plugin.so*", "libtbb.so*", "libhwloc.so*"),
                ),
                "https://docs.openvino.ai/2026/openvino-workflow/running-inference.html",
            ),
        ),
    ),
    BackendDescriptor(
        "executorch",
        f"{_PACKAGE}.embedded.executorch",
        "ExecuTorch",
        (Platform("executorch", "", "executorch", "model.pte"),),
        (
            Library(
                "executorch",
                install_extra("executorch"),
                (
                    *("libexecutorch.so*", "libexecutorch_backend_xnnpack.so*"),
                    "libexecutorch_kernels_optimized.so*",
                ),
                "https://docs.pytorch.org/executorch/stable/using-executorch-cpp.html",
            ),
        ),
    ),
    BackendDescriptor("python", f"{_PACKAGE}.python.backend", "Python"),
    BackendDescriptor("ensemble", f"{_PACKAGE}.pipeline.ensemble", "Ensemble"),
    BackendDescriptor("pipeline", f"{_PACKAGE}.pipeline.pipeline", "Pipeline"),
    BackendDescriptor("triton", f"{_PACKAGE}.remote.triton", "Triton"),
    BackendDescriptor("tfserving", f"{_PACKAGE}.remote.tfserving", "TensorFlow Serving"),
    BackendDescriptor("torchserve", f"{_PACKAGE}.remote.torchserve", "TorchServe"),
    BackendDescriptor("fake", f"{_PACKAGE}.fake", "Fake"),
    BackendDescriptor("identity", f"{_PACKAGE}.identity", "Identity"),
)

BACKENDS: ExtensionTable[BackendDescriptor] = ExtensionTable(
    "modelport.backends", BackendDescriptor, {each.name: each for each in _BUILTIN}
)
#: The built-in formats.
PLATFORMS = tuple(platform for backend in _BUILTIN for platform in backend.platforms)
PYTHON = Platform("python", "", "python", "model.py")
PIPELINE = Platform("pipeline", "pipeline", "pipeline", "pipeline.toml")
#: Formats that people write; they are served and never exported.
WRITTEN = (PYTHON, PIPELINE)


def platforms() -> Iterator[Platform]:
    """Every format, the built-in ones first; extensions are imported when those are not enough."""
    yield from PLATFORMS
    for name, backend in BACKENDS.all().items():
        if name not in BACKENDS.builtin:
            yield from backend.platforms


def find_loader(backend: str) -> BackendLoader:
    """The loader of ``backend``.

    Raises:
        Unsupported: no such backend, or its library is not installed.
    """
    load: BackendLoader = _module(backend).load
    return load


def imported() -> list[str]:
    """The built-in backends that this process has imported."""
    return [name for name, each in BACKENDS.builtin.items() if each.module in sys.modules]


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
