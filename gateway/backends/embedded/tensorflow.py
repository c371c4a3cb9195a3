"""Embedded TensorFlow: one signature of a SavedModel, ``serving_default`` unless told otherwise.

The graph runs in a session, as in TensorFlow Serving: nothing of the model is Python, and closing
the session frees it. Parameters are those of Triton's tensorflow backend.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gateway.backends import parameters
from gateway.backends.base import Artifact
from gateway.backends.embedded import placement, runtime
from gateway.backends.embedded.quiet import TENSORFLOW_ENVIRONMENT, quiet
from gateway.backends.embedded.runtime import EmbeddedBackend
from gateway.errors import Internal, InvalidArgument, ModelportError, Unsupported
from gateway.repository import autocomplete
from gateway.repository.autocomplete import ArtifactTensor
from gateway.repository.config import ModelConfig
from gateway.types import NUMPY_DTYPES, Array, Datatype

for _name, _value in TENSORFLOW_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
with quiet():
    import tensorflow as tf
    from tensorflow.python.framework.ops import dismantle_graph

tf.get_logger().setLevel("ERROR")

SIGNATURE = "serving_default"
TAG = "serve"
#: Combinations of outputs asked for, for which a call is kept ready.
MAX_CALLS = 64

_DATATYPES = {
    "bool": Datatype.BOOL,
    "uint8": Datatype.UINT8,
    "uint16": Datatype.UINT16,
    "uint32": Datatype.UINT32,
    "uint64": Datatype.UINT64,
    "int8": Datatype.INT8,
    "int16": Datatype.INT16,
    "int32": Datatype.INT32,
    "int64": Datatype.INT64,
    "float16": Datatype.FP16,
    "float32": Datatype.FP32,
    "float64": Datatype.FP64,
    "bfloat16": Datatype.BF16,
    "string": Datatype.BYTES,
}
#: An operator's own words, between where it was traced and the operator's name.
_REASON = re.compile(r"^(.+)\n\s*\[\[\{\{", re.MULTILINE)
_BFLOAT16 = tf.bfloat16.as_numpy_dtype

v1 = tf.compat.v1


def load(artifact: Artifact) -> EmbeddedBackend:
    """Open and warm a SavedModel (blocking).

    Raises:
        InvalidArgument: it is not a whole SavedModel, lacks the signature, or contradicts its
            configuration.
        Unsupported: an input or output is not a dense tensor, or the GPU asked for is not there.
    """
    folder = runtime.artifact_file(artifact)
    gpu = placement.gpu_of(artifact, _why_no_gpu)
    config = placement.as_placed(artifact.config, gpu)
    options = _session_options(artifact, gpu)
    graph = tf.Graph()
    session = v1.Session(graph=graph, config=options)
    try:
        opened = SavedModelSession(graph, session, folder, config)
    except Exception as error:  # damage shows as a dozen classes
        _free(session, graph)
        if isinstance(error, ModelportError):
            raise
        raise runtime.does_not_load(artifact, error) from error
    return runtime.serve(artifact, opened, config)


def _why_no_gpu(index: int) -> str:
    if not tf.test.is_built_with_cuda():
        return "this build of TensorFlow is for the CPU only; install one with CUDA"
    found = len(tf.config.list_physical_devices("GPU"))
    if index >= found:
        return f"TensorFlow finds {found} usable GPUs, and none of index {index}"
    return ""


def _session_options(artifact: Artifact, gpu: int | None) -> Any:
    config = artifact.config
    # The process's threads are those of its first session, unless a session has its own.
    own = parameters.boolean(
        config, "TF_USE_PER_SESSION_THREADS", "TF_NUM_INTER_THREADS" in config.parameters
    )
    options = v1.ConfigProto(
        intra_op_parallelism_threads=parameters.integer(
            config, "TF_NUM_INTRA_THREADS", artifact.threads
        ),
        inter_op_parallelism_threads=parameters.integer(
            config, "TF_NUM_INTER_THREADS", artifact.threads
        ),
        use_per_session_threads=own,
        allow_soft_placement=True,
    )
    if gpu is None:
        options.device_count["GPU"] = 0
    else:
        options.gpu_options.visible_device_list = str(gpu)
        options.gpu_options.allow_growth = True
    return options


class SavedModelSession:
    """As ``runtime.Session``."""

    def __init__(self, graph: Any, session: Any, folder: Path, config: ModelConfig) -> None:
        tag = parameters.text(config, "TF_GRAPH_TAG", TAG)
        with graph.as_default():
            loaded = v1.saved_model.load(session, [tag], str(folder))
        key = parameters.text(config, "TF_SIGNATURE_DEF", SIGNATURE)
        if key not in loaded.signature_def:
            there = ", ".join(repr(name) for name in sorted(loaded.signature_def)) or "none"
            raise InvalidArgument(
                f"'{folder.name}' has no signature '{key}'; name one of {there} in the parameter "
                "TF_SIGNATURE_DEF"
            )
        signature = loaded.signature_def[key]
        known, _ = autocomplete.declared(config)
        self.inputs = [_input(n, i, known.get(n)) for n, i in sorted(signature.inputs.items())]
        self.outputs = [
            ArtifactTensor(n, _datatype(n, i), _shape(i))
            for n, i in sorted(signature.outputs.items())
        ]
        self._graph, self._session = graph, session
        self._sources = {name: info.name for name, info in signature.outputs.items()}
        self._names = [tensor.name for tensor in self.inputs]
        self._feeds = [signature.inputs[name].name for name in self._names]
        tensors = (*self.inputs, *self.outputs)
        self._bfloat16 = {t.name for t in tensors if t.datatype is Datatype.BF16}
        self._dtypes = {t.name: NUMPY_DTYPES[t.datatype] for t in self.outputs}
        self._call = functools.lru_cache(MAX_CALLS)(self._make_call)

    def _make_call(self, names: tuple[str, ...]) -> Callable[..., Any]:
        call: Callable[..., Any] = self._session.make_callable(
            [self._sources[name] for name in names], feed_list=self._feeds
        )
        return call

    def run(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        feed = [
            inputs[name].view(_BFLOAT16) if name in self._bfloat16 else inputs[name]
            for name in self._names
        ]
        try:
            results = self._call(tuple(names))(*feed)
        except tf.errors.OpError as error:
            found = _REASON.search(str(error))
            reason = runtime.public_reason(Exception(found[1]) if found else error)
            raise Internal(f"inference failed: {reason}") from error
        return [self._array(name, value) for name, value in zip(names, results, strict=True)]

    def _array(self, name: str, value: Any) -> Array:
        if name in self._bfloat16:
            return np.asarray(value).view(np.uint16)
        return np.asarray(value, dtype=self._dtypes[name])

    @property
    def bounded(self) -> bool:
        definition = self._graph.as_graph_def()
        functions = (function.node_def for function in definition.library.function)
        nodes = itertools.chain(definition.node, *functions)
        return not any("While" in node.op or node.op == "NextIteration" for node in nodes)

    def close(self) -> None:
        self._call.cache_clear()
        _free(self._session, self._graph)
        del self._session, self._graph, self._call


def _free(session: Any, graph: Any) -> None:
    session.close()
    # It and its operations hold one another, until Python next looks for such circles.
    dismantle_graph(graph)


def _input(name: str, info: Any, declared: ArtifactTensor | None) -> ArtifactTensor:
    datatype = _datatype(name, info)
    if not info.tensor_shape.unknown_rank:
        return ArtifactTensor(name, datatype, _shape(info))
    if declared is None:
        raise InvalidArgument(
            f"'{name}' has no known rank in the SavedModel; declare it in config.pbtxt"
        )
    return ArtifactTensor(name, datatype, declared.shape)


def _datatype(name: str, info: Any) -> Datatype:
    word = tf.as_dtype(info.dtype).name
    if info.WhichOneof("encoding") != "name" or word not in _DATATYPES:
        raise Unsupported(f"'{name}' is not a dense tensor of a type that can be served: {word}")
    return _DATATYPES[word]


def _shape(info: Any) -> tuple[int, ...]:
    """Of an unknown rank: as a scalar's; running the model tells."""
    return tuple(dim.size for dim in info.tensor_shape.dim)
