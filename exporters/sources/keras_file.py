"""A ``.keras`` file, or a whole model in HDF5, as a model with named tensors."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelport.exporters.model_spec import import_module
from modelport.exporters.requests.random_inputs import model_dims
from modelport.exporters.runtime.tensorflow_runtime import keras, tf
from modelport.exporters.sources import keras_guard
from modelport.exporters.sources.tensor_flags import parse_tensors
from modelport.exporters.sources.tensorflow_module import (
    DeclaredTensor,
    LoadedModule,
    TensorFlowModule,
)
from modelport.gateway.errors import ModelportError, Unsupported, UsageError, first_line
from modelport.gateway.types import NUMPY_DTYPES, Datatype, TensorSpec


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


def load(path: Path, custom_objects: str | None, inputs: Sequence[str]) -> LoadedModule:
    """Read the model in a ``.keras`` or HDF5 file.

    Args:
        custom_objects: the module that registers the file's own classes.
        inputs: declarations of ``--input``, for a subclass of ``keras.Model``.

    Raises:
        UsageError: the file has another suffix, or only weights.
        IntegrityError: the file is damaged, or wants to run code.
        Unsupported: the model never ran, so that nobody knows what it takes.
    """
    if path.suffix in keras_guard.LEGACY_SUFFIXES:
        keras_guard.check_legacy(path, _registered(custom_objects))
    elif path.suffix == ".keras":
        keras_guard.read_config(path, _registered(custom_objects))
    else:
        raise UsageError(f"'{path.name}' must end in .keras, .h5 or .hdf5; rename it")

    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as error:
        raise keras_guard.damaged(path, error) from error
    kept = [x.name for x in model._flatten_layers() if getattr(x, "stateful", False)]
    if kept:
        raise Unsupported(
            f"layer '{kept[0]}' keeps its state for the next call, but requests are independent; "
            "build it with stateful=False, or pass the state: return_state=True and initial_state"
        )
    if model.built and getattr(model, "inputs", None):
        return _functional(model)
    shapes = model.built and getattr(model, "_build_shapes_dict", None)
    if not shapes:
        raise Unsupported(
            f"'{path.name}' does not declare its inputs; begin it with keras.Input, or call it "
            "once, and save it again"
        )
    declared = {spec.name: spec for spec in parse_tensors(inputs)[0]}
    try:
        called = _called(model, shapes, declared)
    except ModelportError:
        raise
    except Exception as error:
        raise Unsupported(
            f"'{path.name}' cannot be called with the inputs of its first call "
            f"({first_line(error)}); declare others with --input, or begin it with keras.Input"
        ) from error
    found = _functional(called)
    guessed = ", ".join(x.name for x in found.inputs if x.name not in declared)
    notice = f"{guessed}: FP32, of the sizes of the first call; --input declares others"
    return replace(found, notices=[notice] if guessed else [])


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _called(model: Any, shapes: Mapping[str, Any], declared: Mapping[str, TensorSpec]) -> Any:
    """The functional model of a call of ``model``, a subclass, with inputs of these ``shapes``.

    Keras saves the shapes of the first call alone: the batch stays open, and a datatype is float32
    unless it is declared.
    """
    parameters = inspect.signature(model.call).parameters.values()
    taken = [x.name for x in parameters if x.default is x.empty and x.kind not in _VARIADIC]
    known = {
        taken[0] if key == "input_shape" else key.removesuffix("_shape"): shape
        for key, shape in shapes.items()
    }
    for name in taken:
        if name not in known and name not in declared:
            raise UsageError(
                f"Keras saves no shape of '{name}'; declare --input '{name}:FP32[...]'"
            )
    given = {
        name: _symbolic(known.get(name), name, declared)
        for name in {**known, **dict.fromkeys(taken)}
    }
    if len(given) == 1:
        (only,) = given.values()
        return keras.Model(only, model(only, training=False))
    return keras.Model(given, model(**given, training=False))


def _symbolic(shape: Any, name: str, declared: Mapping[str, TensorSpec]) -> Any:
    """Inputs of a nested ``shape``, named by the keys of its dicts."""
    if isinstance(shape, dict):
        return {key: _symbolic(each, key, declared) for key, each in shape.items()}
    if any(isinstance(each, list | tuple | dict) for each in shape or ()):
        return [_symbolic(each, f"{name}_{i}", declared) for i, each in enumerate(shape)]
    if (spec := declared.get(name)) is None:
        return keras.Input(shape[1:], name=name)
    dims = [dim if isinstance(dim, int) and dim >= 0 else None for dim in model_dims(spec)]
    return keras.Input(
        dims,
        name=name,
        dtype="string" if spec.datatype is Datatype.BYTES else NUMPY_DTYPES[spec.datatype].name,
    )


def _functional(model: Any) -> LoadedModule:
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
        given = flat[0] if len(flat) == 1 and not isinstance(structure, dict) else packed
        if tf.inside_function():  # an artifact draws no dropout and does not advance seeds
            weights = (model.trainable_variables, model.non_trainable_variables)
            with _positive_sizes():
                result, _ = model.stateless_call(*weights, given, training=False)
        else:
            result = model(given, training=False)
        return dict(zip(output_names, keras.tree.flatten(result), strict=True))

    variables = {variable.path: variable.value for variable in model.variables}
    tables = [x for x in model._flatten_layers() if hasattr(x, "lookup_table")]
    words = [word for table in tables if table.dtype == "string" for word in table.get_vocabulary()]
    given = [
        DeclaredTensor(name, tensor.dtype, tuple(tensor.shape))
        for name, (_, tensor) in zip(input_names, inputs, strict=True)
    ]
    found = {name: tensor.dtype for name, (_, tensor) in zip(output_names, results, strict=True)}
    if words:  # Keras declares the texts that a look-up answers as integers
        specs = {x.name: tf.TensorSpec(x.shape, x.dtype) for x in given}
        traced = tf.function(call, autograph=False).get_concrete_function(specs)
        found = {name: x.dtype.name for name, x in traced.structured_outputs.items()}
    return LoadedModule(
        TensorFlowModule(call, [variables, [table.lookup_table for table in tables]]),
        given,
        [
            DeclaredTensor(name, found[name], tuple(tensor.shape))
            for name, (_, tensor) in zip(output_names, results, strict=True)
        ],
        model.count_params(),
        words=words,
        pads=any(getattr(x, "mask_zero", False) for x in model._flatten_layers()),
    )


@contextlib.contextmanager
def _positive_sizes() -> Iterator[None]:
    """Answer Keras' checks that an open size is not 0 or less, which have no value in a trace."""
    original = tf.Tensor.__bool__

    def decided(tensor: Any) -> bool:
        if tensor.op.type in ("Less", "LessEqual") and _is_size(tensor.op.inputs[0]):
            return False
        return bool(original(tensor))

    tf.Tensor.__bool__ = decided
    try:
        yield
    finally:
        tf.Tensor.__bool__ = original


#: Operations that make a size of other sizes.
_OF_SIZES = ("AddV2", "Cast", "FloorDiv", "Mul", "Pack", "StridedSlice")


def _is_size(tensor: Any) -> bool:
    if tensor.op.type in ("Shape", "Const"):
        return True
    return tensor.op.type in _OF_SIZES and all(map(_is_size, tensor.op.inputs))


def _key(where: tuple[Any, ...]) -> str:
    """The keys that lead to a tensor; empty if it lies in a plain list."""
    return "_".join(str(key) for key in where) if any(isinstance(k, str) for k in where) else ""


def _names(wanted: Iterable[str], default: str) -> list[str]:
    """Unique names that every format can store."""
    names: dict[str, None] = {}
    repeated: Counter[str] = Counter()
    for name in wanted:
        plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or default
        if plain[0].isdigit():
            plain = f"{default}_{plain}"
        unique = plain
        while unique in names:
            repeated[plain] += 1
            unique = f"{plain}_{repeated[plain]}"
        names[unique] = None
    return [*names]
