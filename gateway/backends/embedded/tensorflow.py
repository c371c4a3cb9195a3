"""Embedded TensorFlow: a SavedModel with all its signatures.

The configuration declares one of them, by default ``serving_default``, which every dialect serves;
TensorFlow Serving requests may name any.

The graph runs in a session, as in TensorFlow Serving: the model runs no Python code, and closing
the session frees it. Parameters are those of Triton's tensorflow backend.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded import embedded_backend, placement, serving
from modelport.gateway.backends.embedded.embedded_backend import EmbeddedBackend
from modelport.gateway.backends.embedded.native_output import (
    TENSORFLOW_ENVIRONMENT,
    filtered_stderr,
)
from modelport.gateway.errors import Internal, InvalidArgument, ModelportError, Unsupported
from modelport.gateway.repository import autocomplete
from modelport.gateway.repository.artifact_checks import saved_model_guard
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import (
    DTYPE_NAMES,
    NUMPY_DTYPES,
    Array,
    Datatype,
    ModelSignature,
    TensorSpec,
)
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import serving_pb2, tensorflow_pb2

for _name, _value in TENSORFLOW_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
with filtered_stderr():
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.framework.ops import dismantle_graph

    from modelport.gateway.backends.embedded import tensorflow_state
    from modelport.gateway.backends.embedded.tensorflow_state import Variables

tf.get_logger().setLevel("ERROR")

SIGNATURE = "serving_default"
SIGNATURE_PARAMETER = "TF_SIGNATURE_DEF"
TAG = "serve"
#: Signatures that initialise or train a model.
_NOT_SERVED = frozenset({"__saved_model_init_op", "__saved_model_train_op"})
#: Combinations of requested outputs with a cached call.
MAX_CALLS = 64

_DATATYPES = {name: datatype for datatype, name in DTYPE_NAMES.items()}
#: An operator's message, between its traceback and its name.
_REASON = re.compile(r"^(.+)\n\s*\[\[\{\{", re.MULTILINE)
_BFLOAT16 = tf.bfloat16.as_numpy_dtype

v1 = tf.compat.v1


def load(artifact: Artifact) -> EmbeddedBackend:
    """Open and warm a SavedModel (blocking).

    Raises:
        InvalidArgument: it is not a complete SavedModel, lacks the signature, or contradicts its
            configuration.
        IntegrityError: the graph can do more than compute, and is not trusted.
        Unsupported: an input or output is not a dense tensor, or the GPU is missing.
    """
    folder = embedded_backend.artifact_file(artifact)
    if folder.name == saved_model_guard.FILENAME:  # the version's folder is the SavedModel
        folder = folder.parent
    gpu = placement.gpu_of(artifact, _why_no_gpu)
    config = placement.as_placed(artifact.config, gpu)
    if not artifact.native:
        saved_model_guard.check(folder)
    options = _session_options(artifact, gpu)
    graph = tf.Graph()
    session = v1.Session(graph=graph, config=options)
    try:
        with embedded_backend.opening(artifact):
            opened = TensorFlowSession(graph, session, folder, config)
    except ModelportError:
        _free(session, graph)
        raise
    backend = serving.serve(artifact, opened, opened.declared(config))
    try:
        named = opened.named(config, backend.config)
        backend.serve_signatures(
            {name: saved.signature for name, saved in named.items()},
            {name: saved.run_any for name, saved in named.items()},
            opened.signature_defs,
        )
    except BaseException:
        backend.unload()
        raise
    return backend


def _why_no_gpu(index: int) -> str:
    if not tf.test.is_built_with_cuda():
        return "this build of TensorFlow supports only the CPU; install one with CUDA"
    found = len(tf.config.list_physical_devices("GPU"))
    if index >= found:
        return f"TensorFlow finds {found} usable GPUs, none with index {index}"
    return ""


def _session_options(artifact: Artifact, gpu: int | None) -> Any:
    config = artifact.config
    # Sessions without their own threads share those of the process's first session.
    own = parameters.boolean(
        config, "TF_USE_PER_SESSION_THREADS", "TF_NUM_INTER_THREADS" in config.parameters
    )
    options = v1.ConfigProto(
        intra_op_parallelism_threads=parameters.threads(
            config, "TF_NUM_INTRA_THREADS", artifact.threads
        ),
        inter_op_parallelism_threads=parameters.threads(
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


class TensorFlowSession:
    """A ``ModelSession`` over the signature that the configuration names."""

    def __init__(self, graph: Any, session: Any, folder: Path, config: ModelConfig) -> None:
        tag = parameters.text(config, "TF_GRAPH_TAG", TAG)
        with graph.as_default():
            loaded = v1.saved_model.load(session, [tag], str(folder))
        self.definitions: dict[str, Any] = dict(loaded.signature_def)
        self.key = _default_signature(self.definitions, config, folder)
        known, _ = autocomplete.declared(config)
        self._graph, self._session = graph, session
        served = {n: each for n, each in self.definitions.items() if n not in _NOT_SERVED}
        self._variables = Variables(
            graph,
            session,
            {name: [info.name for info in each.outputs.values()] for name, each in served.items()},
            folder.name,
        )
        self.state = self._variables.names
        self._default = self._signature(self.key, known)
        self.inputs, self.outputs = self._default.inputs, self._default.outputs
        self.run = self._default.run
        self._others: list[SavedSignature] = []

    def _signature(
        self, name: str, known: Mapping[str, ArtifactTensor], max_batch_size: int = 0
    ) -> SavedSignature:
        first_values: Callable[[], AbstractContextManager[None]] = nullcontext
        if self.state:
            first_values = partial(self._variables.first_values, name)
        definition = self.definitions[name]
        return SavedSignature(self._session, definition, known, first_values, max_batch_size)

    def declared(self, config: ModelConfig) -> ModelConfig:
        """A copy of ``config``, completed from the artifact.

        Inputs of unknown rank become vectors of any length.
        """
        completed = type(config)()
        completed.CopyFrom(config)
        if self.key != SIGNATURE:
            completed.parameters[SIGNATURE_PARAMETER].string_value = self.key
        if self._default.unknown_ranks and not config.input and not config.output:
            for tensor in self.inputs:
                autocomplete.declare(completed.input.add(), tensor, False)
        return completed

    def named(self, given: ModelConfig, completed: ModelConfig) -> dict[str, SavedSignature]:
        """Every signature that can be served, by name.

        Without the default signature if the configuration ``given`` declares its inputs: then its
        shapes bind every dialect.
        """
        found = {}
        for name in sorted(self.definitions.keys() - _NOT_SERVED):
            if name == self.key and given.input:
                continue
            try:
                signature = self._signature(name, {}, completed.max_batch_size)
            except Unsupported:  # no dense tensors, such as an initialiser
                continue
            found[name] = signature
            self._others.append(signature)
        return found

    @property
    def signature_defs(self) -> bytes:
        """A serialized ``SignatureDefMap`` without default values, which may be large."""
        message = serving_pb2.SignatureDefMap()
        for name, definition in self.definitions.items():
            message.signature_def[name].ParseFromString(definition.SerializeToString())
            message.signature_def[name].ClearField("defaults")
        return bytes(message.SerializeToString())

    @property
    def bounded(self) -> bool:
        return not any("While" in kind or kind == "NextIteration" for kind in self._operators())

    @property
    def random(self) -> bool:
        return any(map(tensorflow_state.RANDOM.fullmatch, self._operators()))

    def _operators(self) -> set[str]:
        definition = self._graph.as_graph_def()
        functions = (function.node_def for function in definition.library.function)
        return {node.op for node in itertools.chain(definition.node, *functions)}

    def close(self) -> None:
        for signature in (self._default, *self._others):
            signature.close()
        self._variables.close()
        _free(self._session, self._graph)
        del self._session, self._graph, self._default, self._others, self.run


class SavedSignature:
    """One signature of an open SavedModel.

    As in TensorFlow Serving, the graph decides which shapes it accepts.
    """

    def __init__(
        self,
        session: Any,
        definition: Any,
        known: Mapping[str, ArtifactTensor],
        first_values: Callable[[], AbstractContextManager[None]],
        max_batch_size: int,
    ) -> None:
        infos = sorted(definition.inputs.items())
        self.unknown_ranks = [n for n, i in infos if i.tensor_shape.unknown_rank and n not in known]
        self.inputs = [_input(name, info, known.get(name)) for name, info in infos]
        self.outputs = [
            ArtifactTensor(n, _datatype(n, i), _shape(i))
            for n, i in sorted(definition.outputs.items())
        ]
        self._session = session
        self._first_values, self._max_batch_size = first_values, max_batch_size
        self._sources = {name: info.name for name, info in definition.outputs.items()}
        self._feeds = [info.name for _, info in infos]
        self._defaults = {n: _default(n, value) for n, value in definition.defaults.items()}
        tensors = (*self.inputs, *self.outputs)
        self._bfloat16 = {t.name for t in tensors if t.datatype is Datatype.BF16}
        self._dtypes = {t.name: NUMPY_DTYPES[t.datatype] for t in self.outputs}
        self._call = functools.lru_cache(MAX_CALLS)(self._make_call)

    @property
    def signature(self) -> ModelSignature:
        """Inputs and outputs in the graph's own shapes, with a batch dimension if dynamic."""
        tensors = (*self.inputs, *self.outputs)
        batched = not self.unknown_ranks and all(t.shape[:1] == (-1,) for t in tensors)
        most = self._max_batch_size if batched else 0

        def spec(tensor: ArtifactTensor) -> TensorSpec:
            dims = tensor.shape[1:] if most else tensor.shape
            optional = tensor.name in self._defaults
            return TensorSpec(tensor.name, tensor.datatype, dims, optional=optional)

        inputs, outputs = (tuple(map(spec, side)) for side in (self.inputs, self.outputs))
        return ModelSignature(inputs, outputs, most, any_shape=True)

    def _make_call(self, names: tuple[str, ...]) -> Callable[..., Any]:
        options = config_pb2.CallableOptions()
        options.feed.extend(self._feeds)
        options.fetch.extend(self._sources[name] for name in names)
        # Public calls compare shapes with the graph's placeholders, which the graph does not
        # require.
        call: Callable[..., Any] = self._session._make_callable_from_options(options)
        return call

    def run_any(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        """Run a request with unchecked shapes, which the graph may refuse."""
        try:
            return self._run(names, self._defaults | inputs)
        except tf.errors.InvalidArgumentError as error:
            raise InvalidArgument(_reason(error)) from error
        except tf.errors.OpError as error:
            raise Internal(f"inference failed: {_reason(error)}") from error

    def run(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        try:
            return self._run(names, self._defaults | inputs if self._defaults else inputs)
        except tf.errors.OpError as error:
            raise Internal(f"inference failed: {_reason(error)}") from error

    def _run(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        feed = [
            inputs[t.name].view(_BFLOAT16) if t.name in self._bfloat16 else inputs[t.name]
            for t in self.inputs
        ]
        with self._first_values():
            results = self._call(tuple(names))(*feed)
        return [self._array(name, value) for name, value in zip(names, results, strict=True)]

    def _array(self, name: str, value: Any) -> Array:
        if name in self._bfloat16:
            return np.asarray(value).view(np.uint16)
        return np.asarray(value, dtype=self._dtypes[name])

    def close(self) -> None:
        self._call.cache_clear()
        del self._session, self._call, self._first_values


def _default(name: str, value: Any) -> Array:
    return tensor_proto.decode(
        name, tensorflow_pb2.TensorProto.FromString(value.SerializeToString())
    ).data


def _reason(error: Exception) -> str:
    found = _REASON.search(str(error))
    return embedded_backend.public_reason(Exception(found[1]) if found else error)


def _default_signature(known: Mapping[str, Any], config: ModelConfig, folder: Path) -> str:
    """The signature that the model has in every dialect.

    Without ``serving_default`` it is any other, as in Triton.
    """
    usual = [name for name in sorted(known) if name not in _NOT_SERVED]
    fallback = SIGNATURE if SIGNATURE in known or not usual else usual[0]
    key = parameters.text(config, SIGNATURE_PARAMETER, fallback)
    if key not in known:
        there = ", ".join(repr(name) for name in usual) or "none"
        raise InvalidArgument(
            f"'{folder.name}' has no signature '{key}'; set the parameter "
            f"{SIGNATURE_PARAMETER} to one of {there}"
        )
    return key


def _free(session: Any, graph: Any) -> None:
    session.close()
    # The graph and its operations form reference cycles, so freeing them would be late.
    dismantle_graph(graph)


def _input(name: str, info: Any, declared: ArtifactTensor | None) -> ArtifactTensor:
    datatype = _datatype(name, info)
    if not info.tensor_shape.unknown_rank:
        return ArtifactTensor(name, datatype, _shape(info))
    return ArtifactTensor(name, datatype, (-1,) if declared is None else declared.shape)


def _datatype(name: str, info: Any) -> Datatype:
    word = tf.as_dtype(info.dtype).name if info.dtype else "nothing"
    if info.WhichOneof("encoding") != "name" or word not in _DATATYPES:
        raise Unsupported(f"'{name}' is not a dense tensor of a supported type: {word}")
    return _DATATYPES[word]


def _shape(info: Any) -> tuple[int, ...]:
    """The shape; an unknown rank counts as a scalar, until a run shows the real one."""
    return tuple(dim.size for dim in info.tensor_shape.dim)
