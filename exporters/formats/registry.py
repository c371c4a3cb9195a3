"""The export formats: one descriptor each; all other code is format-neutral.

One module per format opens artifacts, ``open_session(path, trusted)``. One module per format and
source framework writes them, ``export(source, path, target)``. The descriptors name modules by
string, so that choosing ONNX imports no TensorFlow.

To add one, write these modules and a descriptor: here, or in a package of its own, as entry point
``modelport.formats``. The backend that serves the format declares it as ``Platform``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelport.exporters.formats import onnx_opsets
from modelport.exporters.formats.base import ExportTarget, ParitySession
from modelport.exporters.loaded_model import Framework, Source
from modelport.gateway.backend_registry import Platform, platforms
from modelport.gateway.errors import Unsupported, suggestion
from modelport.gateway.extensions import ExtensionError, ExtensionTable
from modelport.gateway.extras import missing_extra
from modelport.gateway.types import Array

if TYPE_CHECKING:
    from modelport.exporters.optimization.result import GraphOptimization


@dataclass(frozen=True, slots=True)
class ExportRoute:
    """The conversion from a framework to a format.

    Attributes:
        module: the module with ``export(source, path, target)``.
        precisions: the accepted values of ``--dtype`` and ``--quantize``.
        libraries: distributions whose versions the certificate records.
        int4_opset: the first operator set with 4-bit tensors, if this route writes it.
    """

    module: str
    precisions: tuple[str, ...]
    libraries: tuple[str, ...]
    default_opset: int | None = None
    int4_opset: int | None = None

    def opset_for(self, target: ExportTarget) -> int | None:
        """The operator set to write; None for formats without one."""
        if self.default_opset is None or target.opset is not None:
            return self.default_opset and target.opset
        return (target.quantize == "int4" and self.int4_opset) or self.default_opset


@dataclass(frozen=True, slots=True)
class Format:
    """Descriptor of a format; the backend that serves it has its ``Platform``.

    Attributes:
        name: the word of ``--format``, and of the platform.
        opener: the module with ``open_session(path, trusted)``.
        routes: the module that writes it, by the framework of the model.
        optimizer: the module with ``optimize(source, draft, path, target)``, if converted files are
            optimised and quantised afterwards.
    """

    name: str
    opener: str
    routes: Mapping[Framework, ExportRoute]
    optimizer: str = ""

    @property
    def platform(self) -> Platform:
        for platform in platforms():
            if platform.format == self.name:
                return platform
        raise Unsupported(
            f"no backend serves format '{self.name}'; the package that registers the format has to "
            "register a backend with this platform, too"
        )

    def export(self, source: Source, path: Path, target: ExportTarget) -> None:
        """Write ``source`` to ``path``.

        Raises:
            Unsupported: the converter refuses, or is not installed.
        """
        _load(self.routes[source.framework].module).export(source, path, target)

    def optimizes(self, target: ExportTarget) -> bool:
        """Whether a converted file has to be optimised or quantised for ``target``."""
        return bool(self.optimizer and (target.optimize or target.quantize))

    def optimize(
        self, source: Source, draft: Path, path: Path, target: ExportTarget
    ) -> GraphOptimization:
        """Write the converted file ``draft`` to ``path``, optimised and quantised.

        Raises:
            Unsupported: the library refuses the graph, or is not installed.
            UsageError: the model does not run on the calibration data.
        """
        result: GraphOptimization = _load(self.optimizer).optimize(source, draft, path, target)
        return result

    def first_difference(
        self, source: Source, path: Path, target: ExportTarget, inputs: Mapping[str, Array]
    ) -> str:
        """Describe the operator at which the artifact and ``source`` part; empty if unknown.

        A module that writes a format may have a function of this name.
        """
        module = _load(self.routes[source.framework].module)
        search = getattr(module, "first_difference", None)
        return "" if search is None else search(source, path, target, inputs)

    def open_session(self, path: Path, trusted: bool = False) -> ParitySession:
        """Open ``path`` in the runtime that serves it.

        Args:
            trusted: the artifact was made here, or someone vouches for it. Otherwise native code
                and operators that access files are refused.
        """
        session: ParitySession = _load(self.opener).open_session(path, trusted)
        return session


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(error) from error


_TORCH, _TF = Framework.PYTORCH, Framework.TENSORFLOW
_TRACED = ("fp32", "fp16", "bf16")
_KERAS = ("tensorflow", "keras")
_QUANTIZED = ("int8", "int8-weight-only", "int4")
_ADOPTED = (*_TRACED, *_QUANTIZED)
_TREES = ("skl2onnx", "onnxmltools", "onnx", "onnxruntime")
_LITE = (*_KERAS, "ai-edge-litert")


def _traced(module: str) -> dict[Framework, ExportRoute]:
    return {_TORCH: ExportRoute(module, _TRACED, ("torch",))}


def _builtin(
    name: str, opener: str, routes: Mapping[Framework, ExportRoute], optimizer: str = ""
) -> Format:
    """A format whose modules lie in this package."""
    local = {
        framework: replace(route, module=f"{__package__}.{route.module}")
        for framework, route in routes.items()
    }
    return Format(name, f"{__package__}.{opener}", local, optimizer)


_BUILTIN = (
    _builtin(
        "onnx",
        "onnx_session",
        {
            _TORCH: ExportRoute(
                "onnx",
                ("fp32", "fp16", *_QUANTIZED),
                ("torch", "onnx", "onnxscript", "onnxruntime"),
                default_opset=onnx_opsets.TORCH_DEFAULT,
                int4_opset=onnx_opsets.INT4,
            ),
            _TF: ExportRoute(
                "tensorflow_onnx",
                ("fp32", *_QUANTIZED),
                (*_KERAS, "tf2onnx", "onnx", "onnxruntime"),
                default_opset=onnx_opsets.TENSORFLOW[-1],
            ),
            Framework.RECORDED: ExportRoute(
                "onnx_adopted",
                _ADOPTED,
                ("onnx", "onnxruntime"),
                default_opset=onnx_opsets.TORCH_DEFAULT,
            ),
            **{
                framework: ExportRoute(
                    "trees_onnx", ("fp32",), (framework, *_TREES), default_opset=onnx_opsets.TREES
                )
                for framework in (*(Framework.SCIKIT_LEARN, Framework.XGBOOST, Framework.LIGHTGBM),)
            },
            Framework.CATBOOST: ExportRoute(
                "trees_onnx", ("fp32",), ("onnx", "onnxruntime"), default_opset=onnx_opsets.TREES
            ),
        },
        optimizer="modelport.exporters.optimization.onnx_graph",
    ),
    _builtin("torchscript", "torchscript", _traced("torchscript")),
    _builtin(
        "savedmodel",
        "savedmodel",
        {
            _TORCH: ExportRoute("savedmodel", _TRACED, ("torch", *_KERAS)),
            _TF: ExportRoute("savedmodel", ("fp32",), _KERAS),
        },
    ),
    _builtin(
        "tflite",
        "tflite",
        {
            _TORCH: ExportRoute("tflite", ("fp32", "fp16", "int8"), ("torch", *_LITE)),
            _TF: ExportRoute("tflite", ("fp32", "fp16", "int8"), _LITE),
        },
    ),
    _builtin(
        "openvino",
        "openvino_session",
        {
            _TORCH: ExportRoute(
                "openvino", ("fp32", "fp16"), ("torch", "onnx", "onnxscript", "openvino")
            ),
            _TF: ExportRoute(
                "openvino", ("fp32", "fp16"), (*_KERAS, "tf2onnx", "onnx", "openvino")
            ),
        },
    ),
    _builtin("pt2", "pt2", _traced("pt2")),
    _builtin("aoti", "aoti", _traced("aoti")),
    _builtin(
        "executorch",
        "executorch",
        {_TORCH: ExportRoute("executorch", ("fp32",), ("torch", "executorch"))},
    ),
)

FORMATS: ExtensionTable[Format] = ExtensionTable(
    "modelport.formats", Format, {each.name: each for each in _BUILTIN}
)

#: The formats of ``--format all``.
ALL = ("onnx", "torchscript", "savedmodel", "tflite")


def find_format(name: str) -> Format:
    """Find a format by name.

    Raises:
        Unsupported: there is none.
    """
    try:
        found = FORMATS.get(name)
    except ExtensionError as error:
        raise Unsupported(f"--format '{name}': {error} ({error.reason})") from error
    if found is None:
        known = FORMATS.names()
        likely = suggestion(name, (*known, "all"))
        raise Unsupported(
            f"--format '{name}' is not supported; use {', '.join(known)} or all; "
            f"{likely}".removesuffix("; ")
        )
    return found


def check_route(source: Source, row: Format, target: ExportTarget) -> None:
    """Raise ``Unsupported`` unless ``source`` can be exported to the format in that precision.

    The message names the formats that work.
    """
    if target.precision in _precisions(source, row):
        return
    working = [
        name
        for name, other in FORMATS.all().items()
        if target.precision in _precisions(source, other)
    ]
    asked = f" in {target.precision}" if target.precision != "fp32" else ""
    why = f"{source.framework} model '{source.spec.name}' cannot be converted to {row.name}{asked}"
    remedy = f"; use --format {' or '.join(working)}" if working else ""
    raise Unsupported(f"{why}{remedy}")


def _precisions(source: Source, row: Format) -> tuple[str, ...]:
    route = row.routes.get(source.framework)
    return () if route is None else route.precisions
