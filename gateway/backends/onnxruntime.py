"""Embedded ONNX Runtime: one session per model version, sized, warmed and checked at load."""

from __future__ import annotations

import ctypes
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from gateway.backends.base import Artifact
from gateway.backends.instances import INLINE_SECONDS, Instances
from gateway.errors import Internal, InvalidArgument, Unsupported
from gateway.repository import autocomplete
from gateway.repository import config as configuration
from gateway.repository.autocomplete import ArtifactTensor
from gateway.repository.config import ModelConfig
from gateway.types import (
    NUMPY_DTYPES,
    Array,
    Axis,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    TensorSpec,
)

#: Largest batch first, so that the arena grows once; past this many seconds warming stops.
WARMUP_BUDGET_SECONDS = 10.0
#: A batch whose inputs are larger is left to the client that really sends one.
WARMUP_MAX_BYTES = 256 * 1024 * 1024
MAX_WARM_BATCHES = 64
#: A dynamic dimension without an upper bound is warmed, and may run inline, up to this size.
WARMUP_UNBOUNDED_SIZE = 1
#: "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : " in front of what the runtime says.
_PREFIX = re.compile(r"^\[\w+\] : \d+ : \w+ : ")
_QUOTED_FOLDERS = re.compile(r'"[^"]*/([^"/]*)"')
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s\"':]*/)*")
_FLOATS = (Datatype.FP16, Datatype.FP32, Datatype.FP64)
_BFLOAT16_ELEMENT_TYPE = 16  # onnx.TensorProto.BFLOAT16

_DATATYPES = {
    "tensor(bool)": Datatype.BOOL,
    "tensor(uint8)": Datatype.UINT8,
    "tensor(uint16)": Datatype.UINT16,
    "tensor(uint32)": Datatype.UINT32,
    "tensor(uint64)": Datatype.UINT64,
    "tensor(int8)": Datatype.INT8,
    "tensor(int16)": Datatype.INT16,
    "tensor(int32)": Datatype.INT32,
    "tensor(int64)": Datatype.INT64,
    "tensor(float16)": Datatype.FP16,
    "tensor(float)": Datatype.FP32,
    "tensor(double)": Datatype.FP64,
    "tensor(bfloat16)": Datatype.BF16,
    "tensor(string)": Datatype.BYTES,
}


def load(artifact: Artifact) -> OnnxRuntimeBackend:
    """Create and warm a session (blocking).

    Raises:
        InvalidArgument: the file is no ONNX model this runtime takes, or contradicts its config.
        Unsupported: the model has an input or output that is not a tensor.
    """
    session = _session(artifact)
    config = autocomplete.complete(
        artifact.config,
        [_tensor(meta) for meta in session.get_inputs()],
        [_tensor(meta) for meta in session.get_outputs()],
    )
    backend = OnnxRuntimeBackend(artifact, session, config)
    ranks = backend.warm()
    if not artifact.config.output:
        known = autocomplete.with_ranks(config, ranks)
        if known != config:
            backend.unload()
            backend = OnnxRuntimeBackend(artifact, session, known)
            backend.warm()
    return backend


def _session(artifact: Artifact) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = artifact.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # A spinning pool takes the cores from the event loop and from every other model's pool.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    file = artifact.path / artifact.config.default_model_filename
    if not file.is_file():
        raise InvalidArgument(f"'{file.name}' is missing from version {artifact.version}")
    try:
        return ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime raises a class of its own for each status
        reason = Exception(str(error).replace(f"{artifact.path.parent.parent}/", ""))
        raise InvalidArgument(f"'{file.name}' does not load: {_public(reason)}") from error


def _tensor(meta: Any) -> ArtifactTensor:
    if meta.type not in _DATATYPES:
        raise Unsupported(f"'{meta.name}' is a {meta.type}; only dense tensors are served")
    shape = tuple(d if isinstance(d, int) and d >= 0 else -1 for d in meta.shape)
    return ArtifactTensor(meta.name, _DATATYPES[meta.type], shape)


class OnnxRuntimeBackend:
    """An ``Infer`` over one session. Tensors arrive in the shape that the model itself wants."""

    problem = ""

    def __init__(
        self, artifact: Artifact, session: ort.InferenceSession, config: ModelConfig
    ) -> None:
        self.config = config
        self._name, self._version = artifact.model_name, artifact.version
        self._session = session
        self._signature = configuration.signature(config)
        self._output_names = [spec.name for spec in self._signature.outputs]
        self._datatypes = {spec.name: spec.datatype for spec in self._signature.outputs}
        used = {s.datatype for s in (*self._signature.inputs, *self._signature.outputs)}
        self._bytes_inputs = Datatype.BYTES in {s.datatype for s in self._signature.inputs}
        self._bytes_outputs = Datatype.BYTES in {s.datatype for s in self._signature.outputs}
        policy = config.dynamic_batching.default_queue_policy
        self._infer = Instances(
            self._run_bfloat16 if Datatype.BF16 in used else self._run,
            f"{self._name}-{self._version}",
            configuration.instance_count(config),
            policy.max_queue_size,
        )

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        return await self._infer(request, deadline)

    def unload(self) -> None:
        self._infer.close()

    def _run(self, request: InferRequest) -> InferResponse:
        feed = {tensor.name: tensor.data for tensor in request.inputs}
        if self._bytes_inputs:
            feed = {name: _to_strings(name, data) for name, data in feed.items()}
        names = request.outputs or self._output_names
        started = time.perf_counter_ns()
        try:
            arrays = self._session.run(names, feed)
        except Exception as error:
            raise Internal(f"inference failed: {_public(error)}") from error
        request.timing.compute_infer_ns = time.perf_counter_ns() - started
        if self._bytes_outputs:
            arrays = [_to_bytes(array) if array.dtype == object else array for array in arrays]
        datatypes = self._datatypes
        outputs = [Tensor(n, datatypes[n], a) for n, a in zip(names, arrays, strict=True)]
        return InferResponse(self._name, self._version, outputs)

    def _run_bfloat16(self, request: InferRequest) -> InferResponse:
        """numpy has no bfloat16: its bits go in and out through the runtime's own values."""
        feed = {}
        for tensor in request.inputs:
            data = np.asarray(tensor.data, order="C")
            if tensor.datatype is Datatype.BF16:
                feed[tensor.name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
                    data, _BFLOAT16_ELEMENT_TYPE
                )
            else:
                feed[tensor.name] = ort.OrtValue.ortvalue_from_numpy(_to_strings(tensor.name, data))
        names = request.outputs or self._output_names
        started = time.perf_counter_ns()
        try:
            values = self._session.run_with_ort_values(names, feed)
        except Exception as error:
            raise Internal(f"inference failed: {_public(error)}") from error
        request.timing.compute_infer_ns = time.perf_counter_ns() - started
        outputs = []
        for name, value in zip(names, values, strict=True):
            datatype = self._datatypes[name]
            array = _bits(value) if datatype is Datatype.BF16 else _to_bytes(value.numpy())
            outputs.append(Tensor(name, datatype, array))
        return InferResponse(self._name, self._version, outputs)

    def warm(self) -> dict[str, int]:
        """Run every batch size worth its time before the first client does.

        A model may refuse made-up values for reasons of its own; it is then served cold.

        Returns:
            The rank that each output really has; empty where nothing could be run.
        """
        deadline = time.monotonic() + WARMUP_BUDGET_SECONDS
        run = self._infer._run
        ranks: dict[str, int] = {}
        for batch in _batch_sizes(self._signature.max_batch_size):
            if batch * _sample_bytes(self._signature) > WARMUP_MAX_BYTES:
                continue
            request = InferRequest(self._name, list(_samples(self._signature, batch)))
            try:
                started = time.perf_counter()
                response = run(request)
                seconds = time.perf_counter() - started
                if not ranks:  # the largest batch: what the slowest inline run would cost
                    ranks = {tensor.name: tensor.data.ndim for tensor in response.outputs}
                    if seconds < 100 * INLINE_SECONDS:
                        self._allow_inline(request, min(_seconds(run, request) for _ in range(3)))
            except Internal:
                return ranks
            if time.monotonic() > deadline:
                break
        return ranks

    def _allow_inline(self, request: InferRequest, seconds: float) -> None:
        # Integers may be loop counts or shapes: then the time is not told by the size.
        floats = all(spec.datatype in _FLOATS for spec in self._signature.inputs)
        if floats and seconds < INLINE_SECONDS:
            self._infer.allow_inline(sum(tensor.data.size for tensor in request.inputs))


def _seconds(run: Any, request: InferRequest) -> float:
    started = time.perf_counter()
    run(request)
    return time.perf_counter() - started


def _batch_sizes(maximum: int) -> Iterator[int]:
    """``maximum`` and its halves down to 1, then what lies between."""
    maximum = max(1, maximum)
    halves = [maximum >> shift for shift in range(maximum.bit_length())]
    yield from halves
    yield from (batch for batch in range(1, min(maximum, MAX_WARM_BATCHES)) if batch not in halves)


def _samples(signature: ModelSignature, batch: int) -> Iterator[Tensor]:
    """Valid inputs of the largest size that the signature bounds."""
    for spec in signature.inputs:
        if spec.optional:
            continue
        dims = _model_dims(spec, signature.axes)
        shape = (batch, *dims) if signature.max_batch_size else dims
        if spec.datatype is Datatype.BYTES:
            data: Array = np.full(shape, b"", dtype=object)
        else:
            value = spec.minimum or 0
            if isinstance(spec.maximum, str):
                value = _size(signature.axes[spec.maximum])
            data = np.full(shape, value, dtype=NUMPY_DTYPES[spec.datatype])
        yield Tensor(spec.name, spec.datatype, data)


def _sample_bytes(signature: ModelSignature) -> int:
    """Of one batch element's inputs."""
    return sum(
        math.prod(_model_dims(spec, signature.axes)) * NUMPY_DTYPES[spec.datatype].itemsize
        for spec in signature.inputs
    )


def _model_dims(spec: TensorSpec, axes: Any) -> tuple[int, ...]:
    sizes = [
        _size(axes[d]) if isinstance(d, str) else d if d != -1 else WARMUP_UNBOUNDED_SIZE
        for d in spec.dims
    ]
    if spec.reshape is None:
        return tuple(sizes)
    dynamic = iter([s for s, d in zip(sizes, spec.wire_dims, strict=True) if d == -1])
    return tuple(next(dynamic) if d == -1 else d for d in spec.reshape)


def _size(axis: Axis) -> int:
    return axis.maximum if axis.maximum is not None else max(axis.minimum, WARMUP_UNBOUNDED_SIZE)


def _to_strings(name: str, data: Array) -> Array:
    """ONNX strings are UTF-8 text (onnx.proto, ``string_data``), and the runtime takes ``str``."""
    if data.dtype != object:
        return data
    texts = np.empty(data.shape, dtype=object)
    try:
        texts.reshape(-1)[:] = [item.decode() for item in data.reshape(-1)]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"input '{name}' holds bytes that are not UTF-8") from error
    return texts


def _to_bytes(data: Array) -> Array:
    if data.dtype != object:
        return data
    encoded = np.empty(data.shape, dtype=object)
    encoded.reshape(-1)[:] = [item.encode() for item in data.reshape(-1)]
    return encoded


def _bits(value: Any) -> Array:
    shape: Sequence[int] = value.shape()
    content = ctypes.string_at(value.data_ptr(), math.prod(shape) * 2)
    return np.frombuffer(content, dtype=np.uint16).reshape(shape)


def _public(error: Exception) -> str:
    """The first line of the runtime's message, without class names and folders."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    return _FOLDERS.sub("", _QUOTED_FOLDERS.sub(r'"\1"', _PREFIX.sub("", lines[0])))
