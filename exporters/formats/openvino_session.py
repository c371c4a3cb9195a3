"""OpenVINO IRs in OpenVINO on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from modelport.gateway.errors import IntegrityError, first_line
from modelport.gateway.repository.artifact_checks import openvino_guard, trial_load
from modelport.gateway.repository.manifest import sha256_of
from modelport.gateway.runtime.openvino_import import openvino
from modelport.gateway.types import Array

#: As the gateway serves it.
PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False}


class OpenVinoParitySession:
    """An OpenVINO IR in OpenVINO on the CPU."""

    def __init__(self, path: Path) -> None:
        core = openvino.Core()
        core.set_property({"ENABLE_MMAP": False})
        try:
            self._compiled = core.compile_model(core.read_model(path), "CPU", PROPERTIES)
        except RuntimeError as error:
            raise IntegrityError(f"'{path.name}' does not load: {first_line(error)}") from error
        self.inputs = [port.get_any_name() for port in self._compiled.inputs]
        self.outputs = [port.get_any_name() for port in self._compiled.outputs]

    def example(self) -> dict[str, Array]:
        """Zeros of some size that the model takes."""
        return {
            port.get_any_name(): np.zeros(
                [size.get_length() if size.is_static else 2 for size in port.get_partial_shape()],
                port.get_element_type().to_dtype(),
            )
            for port in self._compiled.inputs
        }

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        results = self._compiled(dict(inputs))
        return {name: results[index] for index, name in enumerate(self.outputs)}


def open_session(path: Path, trusted: bool = False) -> OpenVinoParitySession:
    """Open an IR; raise ``IntegrityError`` if it is damaged, unsafe or fails its trial."""
    if not trusted:
        openvino_guard.check(path)
        weights = path.with_suffix(".bin")
        digest = sha256_of(weights) if weights.exists() else ""
        trial_load.run(
            f"{__name__}:try_session", path, weights=digest, runtime=openvino.__version__
        )
    return OpenVinoParitySession(path)


def try_session(path: Path, weights: str, runtime: str) -> None:
    """Open an IR that passed the checks, and run it once."""
    session = OpenVinoParitySession(path)
    session(session.example())
