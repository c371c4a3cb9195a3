"""A Keras 3 model or a SavedModel as a ``Source``; it declares its own signature."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from modelport.exporters import model_registry
from modelport.exporters.loaded_model import Framework, Origin, Source, digest_of
from modelport.exporters.model_spec import BFLOAT16_STEP, AttentionMask, ModelSpec, Sampler
from modelport.exporters.requests import attention_masks, random_inputs
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.exporters.sources import SourceRequest, input_bounds, keras_file, keras_guard
from modelport.exporters.sources.tensorflow_module import (
    DeclaredTensor,
    LoadedModule,
    TensorFlowModule,
)
from modelport.exporters.tolerance import FP32
from modelport.gateway.errors import (
    IntegrityError,
    ModelportError,
    Unsupported,
    UsageError,
    first_line,
)
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.artifact_checks import saved_model_guard
from modelport.gateway.repository.manifest import sha256_of
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, ModelSignature, TensorSpec

#: TensorFlow's names of the datatypes of served tensors.
DATATYPES: Mapping[str, Datatype] = {
    "string" if datatype is Datatype.BYTES else dtype.name: datatype
    for datatype, dtype in NUMPY_DTYPES.items()
    if datatype is not Datatype.BF16
}

#: Operations whose answer to NaN TensorFlow defines; those of Relu and MaxPool are their kernels'.
COMPARISONS = frozenset(
    {"Bucketize", "Equal", "Greater", "GreaterEqual", "IsFinite", "IsInf", "IsNan", "Less"}
    | {"LessEqual", "NotEqual"}
)

BFLOAT16 = "bfloat16"
SIGNATURE = "serving_default"


def load(request: SourceRequest) -> Source:
    """Load the model in a ``.keras`` file or in the folder of a SavedModel.

    The first dimension is the batch if every input and output leaves it open. Other open axes are
    named, and their bounds are those of ``--input``, or found by trial.

    Raises:
        UsageError: the file is of an older kind, or lacks a signature to serve.
        IntegrityError: the file is damaged, or wants to run code or access files.
        Unsupported: an input or output cannot be served.
    """
    path = request.checkpoint
    model = request.model or ""
    is_file = path.suffix == ".keras" or path.suffix in keras_guard.LEGACY_SUFFIXES
    is_module = is_file and ":" not in model and not model_registry.find(model)
    if (request.model is not None and not is_module) or request.model_kwargs:
        raise UsageError(f"'{path}' holds its own architecture; omit --model and --model-kwargs")
    with quiet():
        loaded = _widened(
            _load_saved_model(path, request.task)
            if path.is_dir()
            else keras_file.load(path, request.model, request.inputs)
        )
    signature = _signature(loaded, request.max_batch_size)
    signature = input_bounds.declared(signature, request.inputs)
    reference = TensorFlowEager(loaded.model)
    masks = attention_masks.parse(request.masks) or attention_masks.infer(signature.inputs)
    attention_masks.check(signature, masks)
    signature = input_bounds.settle(signature, reference, masks)
    signature, found = input_bounds.with_ranges(signature, reference, masks)
    if request.inputs:
        signature = _sized(signature, loaded.model)
    _check_repeats(signature, reference, masks)
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", path.resolve().stem).lstrip("._-")[:128] or "model"
    return Source(
        framework=Framework.TENSORFLOW,
        model=loaded.model,
        spec=ModelSpec(
            name,
            lambda model, max_batch_size: signature,
            sample=_sampler(loaded, masks) if loaded.words or loaded.pads else None,
            rtol=loaded.rtol,
            masks=masks,
        ),
        signature=signature,
        found_ranges=found,
        reference=reference,
        compares=functools.partial(_compares, signature, loaded.model),
        parameter_count=loaded.parameter_count,
        origins=(Origin(path.name, _digest(path)),),
        notices=tuple(loaded.notices),
    )


def _compares(signature: ModelSignature, model: TensorFlowModule) -> bool:
    """Whether an operation of the model tells floats apart, so that NaN has an answer."""
    graph = _traced(signature, model).graph.as_graph_def()
    parts = [graph.node, *(part.node_def for part in graph.library.function)]
    return any(
        node.op in COMPARISONS and tf.as_dtype(node.attr["T"].type).is_floating
        for nodes in parts
        for node in nodes
    )


def _traced(signature: ModelSignature, model: TensorFlowModule) -> Any:
    """Trace the model with inputs of the signature's sizes, open ones included."""
    batch = [None] if signature.max_batch_size else []
    specs = {}
    for x in signature.inputs:
        dims = [d if isinstance(d, int) and d >= 0 else None for d in random_inputs.model_dims(x)]
        specs[x.name] = tf.TensorSpec([*batch, *dims], tf.as_dtype(NUMPY_DTYPES[x.datatype]))
    return tf.function(model, autograph=False).get_concrete_function(specs)


def _sized(signature: ModelSignature, model: TensorFlowModule) -> ModelSignature:
    """``signature`` with the sizes of outputs that follow from declared sizes of inputs."""
    if all(-1 not in spec.dims for spec in signature.outputs):
        return signature
    try:
        found = _traced(signature, model).structured_outputs
    except Exception:  # the conversion says why
        return signature

    def sized(spec: TensorSpec) -> TensorSpec:
        if spec.reshape is not None:
            return spec
        shape = found[spec.name].shape.as_list()[bool(signature.max_batch_size) :]
        return replace(spec, dims=tuple(-1 if size is None else size for size in shape))

    return replace(signature, outputs=tuple(map(sized, signature.outputs)))


def _check_repeats(
    signature: ModelSignature, reference: TensorFlowEager, masks: Sequence[AttentionMask]
) -> None:
    """Refuse a model that answers equal inputs differently."""
    named = random_inputs.name_axes(signature)
    sizes = {name: random_inputs.sizes_of(axis)[0] for name, axis in named.axes.items()}
    batch = min(1, signature.max_batch_size)
    inputs = random_inputs.draw(named, batch, sizes, np.random.default_rng(0), masks=masks)
    try:
        first, second = reference(inputs), reference(inputs)
    except Exception:  # the proof says at which inputs it fails
        return
    for name, x in first.items():
        if x.shape != second[name].shape or FP32.outside(x, second[name]).any():
            raise Unsupported(
                f"output '{name}' differs from call to call for equal inputs: the model draws "
                "random numbers or keeps a state, and cannot be verified; take random numbers as "
                "an input, or draw them with training=True alone"
            )


def _sampler(loaded: LoadedModule, masks: Sequence[AttentionMask]) -> Sampler:
    """Draw texts of the model's own words, among others, and no row of padding alone."""

    def sample(
        signature: ModelSignature, batch: int, sizes: Mapping[str, int], rng: np.random.Generator
    ) -> dict[str, Array]:
        inputs = random_inputs.draw(signature, batch, sizes, rng, masks=masks)
        known = [*loaded.words, *random_inputs.WORDS]
        for spec in signature.inputs:
            x = inputs[spec.name]
            if spec.datatype is Datatype.BYTES:
                inputs[spec.name] = random_inputs.texts(x.shape, rng, words=known)
            elif loaded.pads and x.dtype.kind in "iu" and x.ndim > 1 and x.shape[-1]:
                first = x[..., 0]
                first[~x.any(axis=-1)] = 1
        return inputs

    return sample


class TensorFlowEager:
    """A model called with arrays by name, in eager mode."""

    def __init__(self, model: TensorFlowModule) -> None:
        self._model = model

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with tf.device("CPU"):
            results = self._model({name: tf.constant(value) for name, value in inputs.items()})
        return {name: value.numpy() for name, value in results.items()}


def _widened(loaded: LoadedModule) -> LoadedModule:
    """``loaded`` with float32 instead of bfloat16 inputs and outputs.

    No protocol's JSON has bfloat16, and float32 holds all of its values.
    """
    names = {t.name for t in (*loaded.inputs, *loaded.outputs) if t.dtype == BFLOAT16}
    if not names:
        return loaded
    taken = {t.name for t in loaded.inputs if t.dtype == BFLOAT16}

    def call(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        cast = {n: tf.cast(x, tf.bfloat16) if n in taken else x for n, x in tensors.items()}
        results = loaded.model(cast)
        return {n: tf.cast(x, tf.float32) if n in names else x for n, x in results.items()}

    def widened(tensors: Sequence[DeclaredTensor]) -> list[DeclaredTensor]:
        return [replace(t, dtype="float32") if t.name in names else t for t in tensors]

    return replace(
        loaded,
        model=TensorFlowModule(call, loaded.model),
        inputs=widened(loaded.inputs),
        outputs=widened(loaded.outputs),
        rtol=BFLOAT16_STEP,
    )


def _check_saved_model(folder: Path, wanted: str | None) -> str:
    """Check the graph in ``folder`` without loading it, and choose one of its signatures.

    Args:
        wanted: the name of ``--signature``; None: ``serving_default``, or the only one.

    Raises:
        UsageError: it has no such signature, or not exactly one graph.
        IntegrityError: it is damaged, or accesses something outside the model.
    """
    graphs = saved_model_guard.read(folder).meta_graphs
    if len(graphs) != 1:
        raise UsageError(
            f"'{folder.name}' holds {len(graphs)} graphs, but one is needed; save it again for "
            "serving"
        )
    there = [name for name in sorted(graphs[0].signature_def) if not name.startswith("__")]
    chosen = wanted or (there[0] if len(there) == 1 else SIGNATURE)
    if chosen not in there:
        remedy = "choose one with --signature" if there else "save it with signatures=..."
        raise UsageError(
            f"'{folder.name}' has no signature '{chosen}', only "
            f"{', '.join(there) or 'none at all'}; {remedy}"
        )
    saved_model_guard.check(folder)
    return chosen


def _load_saved_model(path: Path, wanted: str | None) -> LoadedModule:
    chosen = _check_saved_model(path, wanted)
    try:
        loaded = tf.saved_model.load(str(path))
        function = loaded.signatures[chosen]
        inputs = function.structured_input_signature[1]
        outputs = function.structured_outputs
    except Exception as error:
        raise _unreadable(path, error) from error
    for name, spec in [*inputs.items(), *outputs.items()]:
        if spec.shape.rank is None:
            raise Unsupported(
                f"'{path.name}' does not state the rank of '{name}'; declare its shape when saving"
            )
    return LoadedModule(
        TensorFlowModule(lambda tensors: function(**tensors), loaded),
        [_declared(name, spec) for name, spec in sorted(inputs.items())],
        [_declared(name, spec) for name, spec in sorted(outputs.items())],
        sum(variable.shape.num_elements() or 0 for variable in function.variables),
        notices=[
            f"signature '{name}' of the SavedModel is not exported, only '{chosen}' is; export it "
            f"with --signature {name}"
            for name in sorted(loaded.signatures)
            if name != chosen
        ],
    )


def _unreadable(path: Path, error: Exception) -> ModelportError:
    """The error about a SavedModel that TensorFlow 2 does not load as a function; a session, which
    the gateway runs it in, may load it all the same."""
    v1 = tf.compat.v1
    with contextlib.suppress(Exception), tf.Graph().as_default(), v1.Session() as session:
        v1.saved_model.load(session, [v1.saved_model.tag_constants.SERVING], str(path))
        return Unsupported(
            f"TensorFlow 2 cannot call '{path.name}' as a function ({first_line(error)}); serve it "
            f"without an export: modelport serve {path.name}"
        )
    return keras_guard.damaged(path, error)


def _declared(name: str, spec: Any) -> DeclaredTensor:
    return DeclaredTensor(name, spec.dtype.name, tuple(spec.shape.as_list()))


def _signature(loaded: LoadedModule, max_batch_size: int) -> ModelSignature:
    every = [*loaded.inputs, *loaded.outputs]
    if not loaded.inputs:
        raise Unsupported("the model takes no inputs; there is nothing to serve")
    batched = max_batch_size > 0 and all(x.shape and x.shape[0] is None for x in every)
    return ModelSignature(
        tuple(_spec(tensor, batched) for tensor in loaded.inputs),
        tuple(_spec(tensor, batched) for tensor in loaded.outputs),
        max_batch_size if batched else 0,
    )


def _spec(tensor: DeclaredTensor, batched: bool) -> TensorSpec:
    if tensor.dtype not in DATATYPES:
        raise Unsupported(
            f"'{tensor.name}' is a {tensor.dtype} tensor, which cannot be exported; use one of "
            f"{', '.join(sorted(DATATYPES))}"
        )
    dims = tuple(-1 if size is None else size for size in tensor.shape[1 if batched else 0 :])
    reshape = None if dims else ()  # a scalar travels as [1]
    return TensorSpec(tensor.name, DATATYPES[tensor.dtype], dims or (1,), reshape=reshape)


def _digest(path: Path) -> str:
    """The digest of a file, or of the names and digests of a folder's files."""
    try:
        if path.is_file():
            return sha256_of(path)
        return digest_of(path, (path / name for name in untrusted_files.below(path)))
    except OSError as error:
        raise IntegrityError(f"'{path}' cannot be read: {error.strerror}") from error
