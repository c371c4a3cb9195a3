"""A Keras 3 model or a SavedModel as a ``Source``; it declares its own signature."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelport.exporters import model_registry
from modelport.exporters.loaded_model import Framework, Origin, Source, digest_of
from modelport.exporters.model_spec import BFLOAT16_STEP, ModelSpec, import_module
from modelport.exporters.requests import attention_masks
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import keras, tf
from modelport.exporters.sources import SourceRequest, input_bounds, keras_guard
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
    dtype.name: datatype
    for datatype, dtype in NUMPY_DTYPES.items()
    if datatype not in (Datatype.BF16, Datatype.BYTES)
}

BFLOAT16 = "bfloat16"
SIGNATURE = "serving_default"

Call = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class TensorFlowModule(tf.Module):  # type: ignore[misc]
    """A model that takes and returns tensors by name.

    It tracks the variables and other resources of the model, but not a Keras model, which would be
    saved too.
    """

    def __init__(self, call: Call, tracked: Any) -> None:
        super().__init__()
        self.tracked = tracked
        self._call = call

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self._call(inputs))


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An input or output as declared by TensorFlow, with its batch dimension."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _LoadedModule:
    """A model that was read; ``others`` are the signatures of a SavedModel that are left out."""

    model: TensorFlowModule
    inputs: Sequence[_Tensor]
    outputs: Sequence[_Tensor]
    parameter_count: int
    rtol: float = FP32.rtol
    others: Sequence[str] = ()


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
    is_module = path.suffix == ".keras" and ":" not in model and not model_registry.find(model)
    if (request.model is not None and not is_module) or request.model_kwargs:
        raise UsageError(f"'{path}' holds its own architecture; omit --model and --model-kwargs")
    with quiet():
        loaded = _widened(
            _load_saved_model(path) if path.is_dir() else _load_keras(path, request.model)
        )
    signature = _signature(loaded, request.max_batch_size)
    signature = input_bounds.declared(signature, request.inputs)
    reference = TensorFlowEager(loaded.model)
    masks = attention_masks.parse(request.masks) or attention_masks.infer(signature.inputs)
    attention_masks.check(signature, masks)
    signature = input_bounds.settle(signature, reference, masks)
    signature, found = input_bounds.with_ranges(signature, reference, masks)
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", path.resolve().stem).lstrip("._-")[:128] or "model"
    return Source(
        framework=Framework.TENSORFLOW,
        model=loaded.model,
        spec=ModelSpec(
            name, lambda model, max_batch_size: signature, rtol=loaded.rtol, masks=masks
        ),
        signature=signature,
        found_ranges=found,
        reference=reference,
        parameter_count=loaded.parameter_count,
        origins=(Origin(path.name, _digest(path)),),
        notices=tuple(
            f"signature '{name}' of the SavedModel is not exported, only '{SIGNATURE}' is"
            for name in sorted(loaded.others)
        ),
    )


class TensorFlowEager:
    """A model called with arrays by name, in eager mode."""

    def __init__(self, model: TensorFlowModule) -> None:
        self._model = model

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with tf.device("CPU"):
            results = self._model({name: tf.constant(value) for name, value in inputs.items()})
        return {name: value.numpy() for name, value in results.items()}


def _widened(loaded: _LoadedModule) -> _LoadedModule:
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

    def widened(tensors: Sequence[_Tensor]) -> list[_Tensor]:
        return [replace(t, dtype="float32") if t.name in names else t for t in tensors]

    return replace(
        loaded,
        model=TensorFlowModule(call, loaded.model),
        inputs=widened(loaded.inputs),
        outputs=widened(loaded.outputs),
        rtol=BFLOAT16_STEP,
    )


def _registered(module: str | None) -> frozenset[str]:
    """The names of the classes that ``--custom-objects`` registers.

    Raises:
        UsageError: the module cannot be imported, or registers none.
    """
    if module is None:
        return frozenset()
    imported = import_module(module, "--custom-objects")
    known = keras.saving.get_custom_objects().items()
    found = {name for name, x in known if not x.__module__.startswith(("keras.", "modelport."))}
    if not found:
        raise UsageError(
            f"--custom-objects: '{imported.__name__}' registers no class; decorate each with "
            "@keras.saving.register_keras_serializable()"
        )
    return frozenset(found)


def _load_keras(path: Path, custom_objects: str | None) -> _LoadedModule:
    if path.suffix.lower() in keras_guard.LEGACY_SUFFIXES:
        raise keras_guard.hdf5_refusal(path)
    if path.suffix != ".keras":
        raise UsageError(f"'{path.name}' must end in .keras; rename it")
    keras_guard.read_config(path, _registered(custom_objects))

    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as error:
        raise keras_guard.damaged(path, error) from error
    if not model.built or not getattr(model, "inputs", None):
        raise Unsupported(
            f"'{path.name}' does not declare its inputs; begin it with keras.Input and save it "
            "again"
        )
    return _functional(model)


def _functional(model: Any) -> _LoadedModule:
    structure = getattr(model, "_inputs_struct", model.inputs)
    inputs = keras.tree.flatten_with_path(structure)
    input_names = _names((_key(where) or tensor.name for where, tensor in inputs), "input")
    results = keras.tree.flatten_with_path(getattr(model, "_outputs_struct", model.outputs))
    # A tensor's own name contains a counter of this process; its layer's name is saved.
    output_names = _names(
        (_key(where) or tensor._keras_history.operation.name for where, tensor in results), "output"
    )

    def call(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        flat = [tensors[name] for name in input_names]
        packed = keras.tree.pack_sequence_as(structure, flat)
        only = len(flat) == 1 and not isinstance(structure, dict)
        result = model(flat[0] if only else packed, training=False)
        return dict(zip(output_names, keras.tree.flatten(result), strict=True))

    variables = {variable.path: variable.value for variable in model.variables}
    layers = model._flatten_layers()
    tables = [layer.lookup_table for layer in layers if hasattr(layer, "lookup_table")]
    return _LoadedModule(
        TensorFlowModule(call, [variables, tables]),
        [
            _Tensor(name, tensor.dtype, tuple(tensor.shape))
            for name, (_, tensor) in zip(input_names, inputs, strict=True)
        ],
        [
            _Tensor(name, tensor.dtype, tuple(tensor.shape))
            for name, (_, tensor) in zip(output_names, results, strict=True)
        ],
        model.count_params(),
    )


def _key(where: tuple[Any, ...]) -> str:
    """The keys that lead to a tensor; empty if it lies in a plain list."""
    return "_".join(str(key) for key in where) if any(isinstance(k, str) for k in where) else ""


def _names(wanted: Iterable[str], default: str) -> list[str]:
    """Unique names that every format can store."""
    names: list[str] = []
    for name in wanted:
        plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or default
        if plain[0].isdigit():
            plain = f"{default}_{plain}"
        numbered = (f"{plain}_{i}" for i in itertools.count(1))
        names.append(next(name for name in itertools.chain([plain], numbered) if name not in names))
    return names


def _check_saved_model(folder: Path) -> None:
    """Check the graph in ``folder`` without loading it.

    Raises:
        UsageError: it has no signature ``serving_default``, or not exactly one graph.
        IntegrityError: it is damaged, or accesses something outside the model.
    """
    graphs = saved_model_guard.read(folder).meta_graphs
    if len(graphs) != 1:
        raise UsageError(
            f"'{folder.name}' holds {len(graphs)} graphs, but one is needed; save it again for "
            "serving"
        )
    if SIGNATURE not in graphs[0].signature_def:
        there = [name for name in sorted(graphs[0].signature_def) if not name.startswith("__")]
        raise UsageError(
            f"'{folder.name}' has no signature '{SIGNATURE}', only "
            f"{', '.join(there) or 'none at all'}; save it with signatures={{'{SIGNATURE}': ...}}"
        )
    saved_model_guard.check(folder)


def _load_saved_model(path: Path) -> _LoadedModule:
    _check_saved_model(path)
    try:
        loaded = tf.saved_model.load(str(path))
        function = loaded.signatures[SIGNATURE]
        inputs = function.structured_input_signature[1]
        outputs = function.structured_outputs
    except Exception as error:
        raise _unreadable(path, error) from error
    for name, spec in [*inputs.items(), *outputs.items()]:
        if spec.shape.rank is None:
            raise Unsupported(
                f"'{path.name}' does not state the rank of '{name}'; declare its shape when saving"
            )
    return _LoadedModule(
        TensorFlowModule(lambda tensors: function(**tensors), loaded),
        [_declared(name, spec) for name, spec in sorted(inputs.items())],
        [_declared(name, spec) for name, spec in sorted(outputs.items())],
        sum(variable.shape.num_elements() or 0 for variable in function.variables),
        others=[name for name in loaded.signatures if name != SIGNATURE],
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


def _declared(name: str, spec: Any) -> _Tensor:
    return _Tensor(name, spec.dtype.name, tuple(spec.shape.as_list()))


def _signature(loaded: _LoadedModule, max_batch_size: int) -> ModelSignature:
    every = [*loaded.inputs, *loaded.outputs]
    if not loaded.inputs:
        raise Unsupported("the model takes no inputs; there is nothing to serve")
    batched = max_batch_size > 0 and all(x.shape and x.shape[0] is None for x in every)
    return ModelSignature(
        tuple(_spec(tensor, batched) for tensor in loaded.inputs),
        tuple(_spec(tensor, batched) for tensor in loaded.outputs),
        max_batch_size if batched else 0,
    )


def _spec(tensor: _Tensor, batched: bool) -> TensorSpec:
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
