"""Embedded ONNX Runtime: one session per model version."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded import (
    embedded_backend,
    onnxruntime_options,
    placement,
    serving,
)
from modelport.gateway.backends.embedded.embedded_backend import Compute, EmbeddedBackend
from modelport.gateway.errors import Internal, InvalidArgument, Unsupported
from modelport.gateway.repository.artifact_checks import onnx_guard
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.types import DTYPE_NAMES, Array, Datatype

_BFLOAT16_ELEMENT_TYPE = 16  # onnx.TensorProto.BFLOAT16

#: A model's parameter: the encoding between BYTES elements and the runtime's text. Latin-1 has a
#: character for each byte and so accepts any bytes, but changes text beyond ASCII.
ENCODING = "string_encoding"
UTF8, LATIN1 = "utf-8", "latin-1"

#: Where the runtime has a name of its own.
_NAMES = {"float32": "float", "float64": "double"}
_DATATYPES = {f"tensor({_NAMES.get(name, name)})": each for each, name in DTYPE_NAMES.items()}


def load(artifact: Artifact) -> EmbeddedBackend:
    """Create and warm a session (blocking).

    Raises:
        InvalidArgument: the file is not a valid ONNX model, or contradicts its configuration.
        IntegrityError: the model uses custom operators or other files, and is not trusted.
        Unsupported: an input or output is not a tensor; or a GPU or accelerator is missing.
    """
    session, gpu = _open(artifact)
    config = placement.as_placed(artifact.config, gpu)
    with embedded_backend.opening(artifact):  # names may be no valid text
        file, encoding = embedded_backend.artifact_file(artifact), _encoding(artifact)
        opened = OnnxRuntimeSession(session, file, encoding, {i.name for i in config.input})
    return serving.serve(artifact, opened, config)


def _encoding(artifact: Artifact) -> str:
    encoding = parameters.text(artifact.config, ENCODING, UTF8)
    if encoding not in (UTF8, LATIN1):
        raise InvalidArgument(
            f"parameter '{ENCODING}' must be '{UTF8}' or '{LATIN1}', not '{encoding}'"
        )
    return encoding


def _open(artifact: Artifact) -> tuple[ort.InferenceSession, int | None]:
    file = embedded_backend.artifact_file(artifact)
    if not artifact.native:
        onnx_guard.check(file)
    options = onnxruntime_options.session_options(artifact)
    gpu, providers = onnxruntime_options.providers(artifact)
    with embedded_backend.opening(artifact):
        # Without other providers a fallback only prints to stdout and tries the CPU again.
        again = len(providers) > 1
        session = ort.InferenceSession(file, options, providers=providers, enable_fallback=again)
    problem = onnxruntime_options.check_providers(session, providers)
    if problem and gpu is not None and onnxruntime_options.CUDA not in session.get_providers():
        # KIND_GPU raises; KIND_AUTO logs the fallback. The session runs on the CPU already.
        gpu = placement.gpu_of(artifact, lambda index: problem)
    elif problem:
        raise Unsupported(f"{problem}; remove it from 'execution_accelerators'")
    return session, gpu


class OnnxRuntimeSession:
    """A ``ModelSession``; without values to convert, ``run`` is the runtime's own.

    The checks of the runtime's Python class before each run take a quarter of a small model's
    time. They look for missing inputs, and concern values and devices that are not used here. On
    the CPU alone, which has no fallback either, comparing the number of inputs is enough.

    Args:
        declared: inputs of the configuration; initializers among them are optional inputs.
    """

    state = ""  # operators keep none

    def __init__(
        self,
        session: ort.InferenceSession,
        file: Path,
        encoding: str = UTF8,
        declared: Collection[str] = (),
    ) -> None:
        self._session, self._file, self._encoding = session, file, encoding
        initializers = session.get_overridable_initializers()
        optional = [meta for meta in initializers if meta.name in declared]
        self.inputs = [_tensor(meta) for meta in (*session.get_inputs(), *optional)]
        self.outputs = [_tensor(meta) for meta in session.get_outputs()]
        tensors = (*self.inputs, *self.outputs)
        self._bfloat16 = {tensor.name for tensor in tensors if tensor.datatype is Datatype.BF16}
        self._bare: Any = getattr(session, "_sess", None)
        bare = self._bare is not None and session.get_providers() == [onnxruntime_options.CPU]
        self.run: Compute = self._run_bare if bare else session.run
        if self._bfloat16:
            self.run = self._run_bfloat16
        elif any(tensor.datatype is Datatype.BYTES for tensor in tensors):
            self.run = self._run_bytes

    @property
    def bounded(self) -> bool:
        return not self._names_any(b"Loop")

    @property
    def random(self) -> bool:
        return self._names_any(b"Random", b"Multinomial", b"Bernoulli", b"Dropout")

    def _names_any(self, *operators: bytes) -> bool:
        # The runtime does not list a graph's operators, but the file contains their names.
        with self._file.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return any(content.find(name) != -1 for name in operators)

    def close(self) -> None:
        del self._session, self._bare, self.run

    def _run_bare(self, names: Sequence[str], inputs: dict[str, Array]) -> Sequence[Array]:
        if len(inputs) != len(self.inputs):
            return self._session.run(names, inputs)  # type: ignore[no-any-return]
        return self._bare.run(names, inputs, None)  # type: ignore[no-any-return]

    def _run_bytes(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        feed = {name: self._to_strings(name, data) for name, data in inputs.items()}
        arrays = self._session.run(names, feed)
        return [self._to_bytes(n, array) for n, array in zip(names, arrays, strict=True)]

    def _run_bfloat16(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        """Run with bfloat16 as the runtime's own values, because numpy has no such type."""
        feed = {}
        for name, array in inputs.items():
            data = np.asarray(array, order="C")
            if name in self._bfloat16:
                feed[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
                    data, _BFLOAT16_ELEMENT_TYPE
                )
            else:
                feed[name] = ort.OrtValue.ortvalue_from_numpy(self._to_strings(name, data))
        values = self._session.run_with_ort_values(names, feed)
        return [
            _bits(value) if name in self._bfloat16 else self._to_bytes(name, value.numpy())
            for name, value in zip(names, values, strict=True)
        ]

    def _to_strings(self, name: str, data: Array) -> Array:
        """Decode BYTES as text, because ONNX strings are UTF-8 (onnx.proto, ``string_data``)."""
        try:
            return _converted(data, lambda item: item.decode(self._encoding))
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                f"input '{name}' holds bytes that are not UTF-8, the encoding of ONNX strings; if "
                f"the model only passes them on, set the parameter '{ENCODING}' to '{LATIN1}' in "
                "its config.pbtxt"
            ) from error

    def _to_bytes(self, name: str, data: Array) -> Array:
        try:
            return _converted(data, lambda item: item.encode(self._encoding))
        except UnicodeEncodeError as error:
            raise Internal(
                f"output '{name}' holds characters that {self._encoding} cannot encode"
            ) from error


def _converted(data: Array, convert: Callable[[Any], Any]) -> Array:
    """``data`` with each element of a BYTES tensor converted; others as they are."""
    if data.dtype != object:
        return data
    converted = np.empty(data.shape, dtype=object)
    converted.reshape(-1)[:] = [convert(item) for item in data.reshape(-1)]
    return converted


def _tensor(meta: Any) -> ArtifactTensor:
    if meta.type not in _DATATYPES:
        raise Unsupported(f"'{meta.name}' is a {meta.type}; only dense tensors are served")
    shape = tuple(d if isinstance(d, int) and d >= 0 else -1 for d in meta.shape)
    return ArtifactTensor(meta.name, _DATATYPES[meta.type], shape)


def _bits(value: Any) -> Array:
    shape: Sequence[int] = value.shape()
    content = ctypes.string_at(value.data_ptr(), math.prod(shape) * 2)
    return np.frombuffer(content, dtype=np.uint16).reshape(shape)
