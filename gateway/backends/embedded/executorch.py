"""Embedded ExecuTorch: one method per instance, for artifacts that are signed or allowed as native.

Its runtime checks a program's structure, but not the memory that each instruction addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from executorch.runtime import Runtime, Verification

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded import embedded_backend, placement, serving
from modelport.gateway.backends.embedded.embedded_backend import EmbeddedBackend, SessionPool
from modelport.gateway.backends.embedded.native_output import filtered_stderr
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import autocomplete
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.artifact_checks.torch_archive import native_code_refused
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import Array

METHOD = "forward"
#: Methods that the exporter adds; they return names, separated by commas.
INPUTS, OUTPUTS = "modelport_inputs", "modelport_outputs"
#: Names of random operators in a program.
_RANDOM = (b"aten::rand", b"aten::bernoulli", b"aten::multinomial", b"aten::normal")


def load(artifact: Artifact) -> EmbeddedBackend:
    """Load and warm one method for each instance (blocking).

    Raises:
        Unsupported: native code is not allowed for the file; or a GPU is requested.
        InvalidArgument: the file is not a valid program, or contradicts its configuration.
    """
    path = embedded_backend.artifact_file(artifact)
    if not artifact.native:
        raise native_code_refused(path.name)
    config = placement.on_cpu(artifact, "ExecuTorch programs")
    if not (config.input and config.output):
        raise InvalidArgument(
            f"'{path.name}' does not store its shapes; declare 'input' and 'output' in config.pbtxt"
        )
    with embedded_backend.opening(artifact), filtered_stderr():
        content = path.read_bytes()
        count = configuration.instance_count(config)
        sessions = [ExecutorchSession(content, path, config) for _ in range(count)]
    return serving.serve(artifact, SessionPool(sessions), config)


class ExecutorchSession:
    """A ``ModelSession`` over a program of its own, for one run at a time."""

    bounded = False  # the runtime does not list a program's instructions
    state = ""  # a run finds buffers that it keeps

    def __init__(self, content: bytes, path: Path, config: ModelConfig) -> None:
        self.random = any(name in content for name in _RANDOM)
        program = Runtime.get().load_program(content, verification=Verification.InternalConsistency)
        names = [_names(program, method) for method in (INPUTS, OUTPUTS)]
        self._method: Any = program.load_method(METHOD)
        self._names, self._outputs = names
        inputs, outputs = autocomplete.declared(config)
        for kind, stored, declared in zip(
            ("input", "output"), names, (inputs, outputs), strict=True
        ):
            if set(stored) != set(declared):
                raise InvalidArgument(
                    f"the configuration declares {kind}s {', '.join(declared)}, but the model has "
                    f"{', '.join(stored)}"
                )
        self.inputs = [inputs[name] for name in self._names]
        self.outputs = [outputs[name] for name in self._outputs]

    def run(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        tensors = [torch.tensor(inputs[name]) for name in self._names]
        found = dict(zip(self._outputs, self._method.execute(tensors), strict=True))
        return [found[name].numpy().copy() for name in names]  # the next run writes to them

    def close(self) -> None:
        del self._method


def _names(program: Any, method: str) -> list[str]:
    found: str = program.load_method(method).execute([])[0]
    return found.split(",")
