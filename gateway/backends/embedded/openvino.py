"""Embedded OpenVINO on the CPU: one compiled model per version, one request per instance.

OpenVINO computes integers in 32 bits, whatever their datatype; larger values are refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded import embedded_backend, placement, serving
from modelport.gateway.backends.embedded.embedded_backend import EmbeddedBackend, SessionPool
from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.artifact_checks import openvino_guard, trial_load
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.manifest import sha256_of
from modelport.gateway.runtime.openvino_import import openvino
from modelport.gateway.types import DTYPE_NAMES, Array, Datatype

DEVICE = "CPU"
#: OpenVINO has no text without extensions, computes FP64 in 32 bits, and numpy has no BF16.
_UNSERVED = (Datatype.BF16, Datatype.BYTES, Datatype.FP64)
_NAMES = {"float16": "f16", "float32": "f32", "bool": "boolean"}
_DATATYPES = {
    _NAMES.get(name, name.replace("uint", "u").replace("int", "i")): datatype
    for datatype, name in DTYPE_NAMES.items()
    if datatype not in _UNSERVED
}
_WIDE = (Datatype.INT64, Datatype.UINT32, Datatype.UINT64)
_INT32 = np.iinfo(np.int32)
_RANDOM = frozenset({"RandomUniform", "Multinomial"})
_HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")


def load(artifact: Artifact) -> EmbeddedBackend:
    """Compile and warm a model (blocking).

    Raises:
        InvalidArgument: the files are not a valid model, or contradict their configuration.
        IntegrityError: the model uses foreign operations, or ends the process that tries it; and is
            not trusted.
        Unsupported: an input or output has an unsupported type, or another device is requested.
    """
    path = embedded_backend.artifact_file(artifact)
    if not artifact.native:
        openvino_guard.check(path)
        weights = path.with_suffix(".bin")
        trial_load.run(
            f"{__name__}:try_load", path, model=artifact.model_name, version=artifact.version,
            config=configuration.to_text(artifact.config), threads=artifact.threads,
            weights=sha256_of(weights) if weights.exists() else "", runtime=openvino.__version__,
        )  # fmt: skip
    return _load(artifact, path)


def try_load(
    path: Path, model: str, version: int, config: str, threads: int, weights: str, runtime: str
) -> None:
    """Load a model that passed the checks, and run it as ``load`` does."""
    _load(Artifact(model, version, path.parent, configuration.parse(config), threads), path)


def _load(artifact: Artifact, path: Path) -> EmbeddedBackend:
    config = placement.on_cpu(artifact, "OpenVINO models")
    count = configuration.instance_count(config)
    properties = _properties(config, artifact.threads, count)
    core = openvino.Core()
    # A mapped file would change if it is overwritten.
    core.set_property({"ENABLE_MMAP": False})
    with embedded_backend.opening(artifact, _reason):
        model = core.read_model(path)
        kinds = {operation.get_type_name() for operation in model.get_ops()}
        compiled = core.compile_model(model, DEVICE, properties)
        declared = {tensor.name for tensor in (*config.input, *config.output)}
        # The batch size that every tensor of the model has; 0: there is none, or no batching.
        shapes = [port.get_partial_shape() for port in (*compiled.inputs, *compiled.outputs)]
        fixed = config.max_batch_size > 0 and all(
            shape.rank.is_static and len(shape) and shape[0] == config.max_batch_size
            for shape in shapes
        )
        batch = config.max_batch_size if fixed else 0
        sessions = [OpenVinoSession(compiled, kinds, declared, batch) for _ in range(count)]
    return serving.serve(artifact, SessionPool(sessions), config)


def _properties(config: ModelConfig, threads: int, count: int) -> dict[str, Any]:
    """Properties of the compiled model, from the parameters of Triton's OpenVINO backend."""
    device = parameters.text(config, "TARGET_DEVICE", DEVICE)
    if device != DEVICE:
        raise Unsupported(f"parameter 'TARGET_DEVICE' must be {DEVICE}, not '{device}'")
    hint = parameters.text(config, "PERFORMANCE_HINT", _HINTS[0]).upper()
    if hint not in _HINTS:
        raise InvalidArgument(f"parameter 'PERFORMANCE_HINT' must be {', '.join(_HINTS)}")
    half = parameters.boolean(config, "HINT_BF16", False)
    threads = parameters.threads(config, "INFERENCE_NUM_THREADS", 0) or threads
    streams = parameters.text(config, "NUM_STREAMS")
    if streams != "AUTO":
        streams = str(parameters.threads(config, "NUM_STREAMS", 0) or min(count, threads))
    return {
        "PERFORMANCE_HINT": hint,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": streams,
        # The processor would decide otherwise, and an artifact would not compute what was proven.
        "INFERENCE_PRECISION_HINT": "bf16" if half else "f32",
        # Other models use the same cores.
        "ENABLE_CPU_PINNING": False,
    }


def _reason(error: Exception) -> str:
    """The last line of OpenVINO's message; the lines before it name its own sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class OpenVinoSession:
    """A ``ModelSession`` over one inference request of a compiled model, for one run at a time.

    A smaller batch than the model's fixed ``batch`` is filled up with zeros.
    """

    def __init__(self, compiled: Any, kinds: set[str], declared: set[str], batch: int) -> None:
        self.bounded, self.random = "Loop" not in kinds, not _RANDOM.isdisjoint(kinds)
        self._request = compiled.create_infer_request()
        self.inputs = [_tensor(port, declared, batch) for port in compiled.inputs]
        self.outputs = [_tensor(port, declared, batch) for port in compiled.outputs]
        self._batch = batch
        self._inputs = {tensor.name: index for index, tensor in enumerate(self.inputs)}
        self._outputs = {tensor.name: index for index, tensor in enumerate(self.outputs)}
        self._wide = [tensor.name for tensor in self.inputs if tensor.datatype in _WIDE]
        self.state = ", ".join(state.name for state in self._request.query_state())

    def run(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        for name in self._wide:
            _check_width(name, inputs[name])
        if self.state:
            self._request.reset_state()
        rows = next(iter(inputs.values())).shape[0] if self._batch else 0
        feed = {self._inputs[name]: self._filled(data) for name, data in inputs.items()}
        results = self._request.infer(feed, share_inputs=True)  # outputs are copies
        arrays = [results[self._outputs[name]] for name in names]
        return [array[:rows] for array in arrays] if self._batch else arrays

    def _filled(self, data: Array) -> Array:
        missing = self._batch - data.shape[0] if self._batch else 0
        if missing <= 0:
            return data
        return np.concatenate((data, np.zeros((missing, *data.shape[1:]), data.dtype)))

    def close(self) -> None:
        del self._request


def _check_width(name: str, data: Array) -> None:
    if data.size and (int(data.max()) > _INT32.max or int(data.min()) < _INT32.min):
        raise InvalidArgument(
            f"input '{name}' has values beyond {_INT32.min} to {_INT32.max}; OpenVINO computes "
            "integers in 32 bits"
        )


def _tensor(port: Any, declared: set[str], batch: int) -> ArtifactTensor:
    names = sorted(port.get_names()) or [port.get_node().get_friendly_name()]
    name = next((name for name in names if name in declared), names[0])
    kind, shape = port.get_element_type().get_type_name(), port.get_partial_shape()
    if kind not in _DATATYPES:
        raise Unsupported(f"'{name}' is of type {kind}, which the openvino backend does not serve")
    if shape.rank.is_dynamic:
        raise Unsupported(f"'{name}' has no fixed number of dimensions; save the model with one")
    dims = [size.get_length() if size.is_static else -1 for size in shape]
    return ArtifactTensor(name, _DATATYPES[kind], tuple([-1, *dims[1:]] if batch else dims))
