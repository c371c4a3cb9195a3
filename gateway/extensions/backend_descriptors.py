"""Descriptors of backends: what ``serve``, ``doctor``, ``package`` and ``compare`` know of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from modelport.gateway.extensions import ExtensionTable


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
                "pip install 'modelport[torch]'",
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
                "pip install 'modelport[tensorflow]'",
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
                "pip install 'modelport[litert]'",
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
                "pip install 'modelport[openvino]'",
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
                "pip install 'modelport[executorch]'",
                (
                    *("libexecutorch.so*", "libexecutorch_backend_xnnpack.so*"),
                    "libexecutorch_kernels_optimized.so*",
                ),
                "https://docs.pytorch.org/executorch/stable/using-executorch-cpp.html",
            ),
        ),
    ),
    BackendDescriptor("ensemble", f"{_PACKAGE}.ensemble", "Ensemble"),
    BackendDescriptor("triton", f"{_PACKAGE}.remote.triton", "Triton"),
    BackendDescriptor("tfserving", f"{_PACKAGE}.remote.tfserving", "TensorFlow Serving"),
    BackendDescriptor("torchserve", f"{_PACKAGE}.remote.torchserve", "TorchServe"),
    BackendDescriptor("managed", f"{_PACKAGE}.managed.backend", "Managed server"),
    BackendDescriptor("fake", f"{_PACKAGE}.fake", "Fake"),
)

BACKENDS: ExtensionTable[BackendDescriptor] = ExtensionTable(
    "modelport.backends", BackendDescriptor, {each.name: each for each in _BUILTIN}
)
#: The built-in formats.
PLATFORMS = tuple(platform for backend in _BUILTIN for platform in backend.platforms)


def platforms() -> Iterator[Platform]:
    """Every format, the built-in ones first; extensions are imported when those are not enough."""
    yield from PLATFORMS
    for name, backend in BACKENDS.all().items():
        if name not in BACKENDS.builtin:
            yield from backend.platforms
