"""The formats a model can be exported to: one row each, and everything else is format-neutral.

A new format is a module with an ``export`` and an ``open_session``, and a row in ``EXPORTERS``. The
row names the module by string, so that choosing ONNX imports no TensorFlow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gateway.errors import Unsupported
from gateway.repository.config import PLATFORMS, Platform
from gateway.types import Array, ModelSignature

if TYPE_CHECKING:
    from torch import nn


class Session(Protocol):
    """An exported artifact, opened by the runtime that will serve it."""

    @property
    def inputs(self) -> Sequence[str]: ...

    @property
    def outputs(self) -> Sequence[str]: ...

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]: ...


@dataclass(frozen=True, slots=True)
class Format:
    """How to write a module as an artifact and how to open it again."""

    name: str
    platform: Platform
    default_opset: int | None
    libraries: tuple[str, ...]
    export: Callable[[nn.Module, ModelSignature, Path, int | None], None]
    open_session: Callable[[Path], Session]


@dataclass(frozen=True, slots=True)
class _Row:
    module: str
    libraries: tuple[str, ...]
    default_opset: int | None = None


EXPORTERS: Mapping[str, _Row] = {
    "onnx": _Row(
        "exporters.formats.onnx", ("torch", "onnx", "onnxscript", "onnxruntime"), default_opset=20
    ),
}


def find_format(name: str) -> Format:
    """The format called ``name``.

    Raises:
        Unsupported: there is no exporter for it, or its libraries are not installed.
    """
    if name not in EXPORTERS:
        raise Unsupported(f"--format '{name}' is not supported; use {' or '.join(EXPORTERS)}")
    row = EXPORTERS[name]
    try:
        module = importlib.import_module(row.module)
    except ImportError as error:
        raise Unsupported(
            f"--format '{name}' needs {', '.join(row.libraries)}: {error}; install modelport[torch]"
        ) from error
    return Format(
        name=name,
        platform=next(platform for platform in PLATFORMS if platform.format == name),
        default_opset=row.default_opset,
        libraries=row.libraries,
        export=module.export,
        open_session=module.open_session,
    )
