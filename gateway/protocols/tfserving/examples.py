"""Classify and Regress: decoding of ``tf.Example`` lists, and interpretation of the outputs.

A model with a single input ``inputs`` of strings parses the examples itself, as models exported for
these methods do (``classifier.cc``, ``regressor.cc``). For other models the features are inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.protocols.tfserving.results import Classes
from modelport.gateway.protocols.tfserving.servable_signatures import (
    ServableSignature,
    SignatureTensor,
    type_name,
)
from modelport.gateway.runtime import offload
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, Tensor, dims_text
from modelport.gateway.wire import raw_tensors, tensor_proto
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.proto import tensorflow_pb2

_EXAMPLES = "inputs"
_CLASSES, _SCORES, _REGRESSION = "classes", "scores", "outputs"
_FLOATS = (Datatype.FP16, Datatype.FP32, Datatype.FP64)
_KINDS = {"float_list": "float", "int64_list": "int64", "bytes_list": "string"}


def decode(message: pb.Input, servable: ServableSignature, size: int) -> list[Tensor]:
    """Decode the examples of a request of ``size`` bytes to the inputs of the model.

    Raises:
        InvalidArgument: There is no example, there are more than the model's batch size, or their
            features do not fit the model's inputs.
    """
    examples = examples_of(message)
    if not examples:
        raise InvalidArgument("Input is empty.")
    # For a SavedModel's own signatures the graph decides.
    if not servable.named and 0 < servable.max_batch_size < len(examples):
        raise InvalidArgument(
            f"inference request batch-size must be <= {servable.max_batch_size} for "
            f"'{servable.name}'"
        )
    context = None
    if message.WhichOneof("kind") == "example_list_with_context":
        context = message.example_list_with_context.context
    most_bytes = servable.max_bytes or tensor_proto.expansion_limit(size)
    inputs = servable.inputs.values()
    if [(e.name, e.datatype, e.shape) for e in inputs] == [(_EXAMPLES, Datatype.BYTES, (-1,))]:
        texts = _texts(context, examples, most_bytes)
        return [Tensor(_EXAMPLES, Datatype.BYTES, raw_tensors.object_array(texts, (len(texts),)))]
    features = _Features(context, examples)
    return [
        Tensor(e.name, e.datatype, _column(e, features, most_bytes))
        for e in inputs
        if not e.optional or features.has(e.name)
    ]


def examples_of(message: pb.Input) -> Sequence[Any]:
    """Return the examples without their context."""
    kind = message.WhichOneof("kind")
    examples: Sequence[Any] = getattr(message, kind).examples if kind else ()
    return examples


def _texts(context: Any, examples: Sequence[Any], most_bytes: int) -> list[bytes]:
    """Serialize the examples, each merged with the context."""
    if context is None:
        return [example.SerializeToString() for example in examples]
    _check_size(context.ByteSize() * len(examples), most_bytes)
    texts = []
    for example in examples:
        merged = tensorflow_pb2.Example()
        merged.CopyFrom(context)
        merged.MergeFrom(example)
        texts.append(merged.SerializeToString())
        offload.checkpoint()
    return texts


def _check_size(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise InvalidArgument(
            f"the context, repeated for every example, is {size} bytes; at most {most_bytes} for a "
            "request of this size"
        )


class _Features:
    """Features of examples; those of the context are defaults."""

    def __init__(self, context: Any, examples: Sequence[Any]) -> None:
        self._context = {} if context is None else context.features.feature
        self._examples = [example.features.feature for example in examples]

    def has(self, name: str) -> bool:
        return name in self._context or any(name in features for features in self._examples)

    def rows(self, spec: SignatureTensor) -> list[Any]:
        """Return the values of every example; those from the context are the same object."""
        name = spec.name
        shared = _values(spec, self._context) if name in self._context else None
        rows = []
        for features in self._examples:
            own = shared is None or name in features
            rows.append(_values(spec, features) if own else shared)
            offload.checkpoint()
        return rows


def _column(spec: SignatureTensor, features: _Features, most_bytes: int) -> Array:
    """Make the array of one feature, ``[examples, ...]``."""
    name, datatype = spec.name, spec.datatype
    rows = features.rows(spec)
    if spec.shape[:1] not in ((-1,), (len(rows),)):
        raise InvalidArgument(f"input '{name}' has no batch dimension for {len(rows)} examples")
    if spec.image is not None and any(type(row[0]) is bytes for row in rows):
        if not all(type(row[0]) is bytes for row in rows):
            raise InvalidArgument(f"feature {name} is a image in some examples, not in all")
        return spec.images([data for row in rows for data in row], [len(rows)])
    shape = _shape(spec, len(rows[0]))
    count = math.prod(shape)
    for index, row in enumerate(rows):
        if len(row) != count:
            raise InvalidArgument(
                f"Feature: {name} has {len(row)} values in example {index}, expected {count}"
            )
    dtype = NUMPY_DTYPES[datatype]
    _check_size(len(rows) * count * dtype.itemsize, most_bytes)
    column = np.empty((len(rows), count), dtype)
    for index, row in enumerate(rows):
        if index and row is rows[index - 1]:  # values of the context are converted once
            column[index] = column[index - 1]
        else:
            _convert(spec, row, column[index])
        offload.checkpoint()
    return column.reshape(len(rows), *shape)


def _convert(spec: SignatureTensor, row: Any, into: Array) -> None:
    """Convert the values of one example's feature."""
    try:
        for start in range(0, len(row), raw_tensors.PIECE):
            with np.errstate(over="ignore"):  # values beyond FP16 become infinity
                into[start : start + raw_tensors.PIECE] = row[start : start + raw_tensors.PIECE]
            offload.checkpoint()
    except OverflowError:
        raise InvalidArgument(
            f"a value of feature {spec.name} does not fit {spec.datatype}"
        ) from None


def _values(spec: SignatureTensor, features: Any) -> Any:
    """Read the values of one example's feature, and check that their kind fits the input."""
    name, datatype = spec.name, spec.datatype
    kind = features[name].WhichOneof("kind") if name in features else None
    values = getattr(features[name], kind).value if kind else ()
    if kind is None or not values:
        raise InvalidArgument(
            f"Feature: {name} (data type: {type_name(datatype)}) is required but could not be "
            "found."
        )
    if datatype is Datatype.BF16:
        raise Unsupported(f"input '{name}' is {datatype}, which a feature cannot hold; use Predict")
    wanted: tuple[str, ...] = ("int64_list",)
    if datatype in _FLOATS:  # JSON has 5 for 5.0
        wanted = ("float_list", "int64_list")
    elif datatype is Datatype.BYTES:
        wanted = ("bytes_list",)
    image = spec.image is not None and kind == "bytes_list" and len(values) == 1
    if kind not in wanted and not image:
        raise InvalidArgument(
            f"Key: {name}.  Data types don't match. Data type: {_KINDS[kind]} but expected type: "
            f"{type_name(datatype)}"
        )
    if datatype is Datatype.BOOL and not all(value in (0, 1) for value in values):
        raise InvalidArgument(f"feature {name} is BOOL; every value must be 0 or 1")
    return values


def _shape(spec: SignatureTensor, count: int) -> tuple[int, ...]:
    """Derive the shape of an example's ``count`` values."""
    dims = spec.shape[1:]
    if dims.count(-1) > 1:
        raise InvalidArgument(
            f"input '{spec.name}' has more than one dynamic dimension, which a feature's "
            "values do not determine; use Predict"
        )
    fixed = math.prod(d for d in dims if d != -1)
    return tuple(count // max(1, fixed) if d == -1 else d for d in dims)


# -- results ---------------------------------------------------------------------------------------


def classification_outputs(servable: ServableSignature) -> tuple[str, ...]:
    """Return ``classes`` and ``scores`` if the model has them, else its only table of floats.

    Raises:
        InvalidArgument: It has neither.
    """
    named = tuple(name for name in (_CLASSES, _SCORES) if name in servable.outputs)
    tables = [
        e.name
        for e in servable.outputs.values()
        if e.datatype is Datatype.FP32 and len(e.shape) == 2
    ]
    if not named and len(tables) != 1:
        raise InvalidArgument(
            "Expected classification signature outputs to contain at least one of "
            f'"{_CLASSES}" or "{_SCORES}", or one FP32 output of shape [batch_size num_classes]'
        )
    return named or (tables[0],)


def classify(outputs: Sequence[Tensor], servable: ServableSignature, examples: int) -> Classes:
    """Interpret outputs as the classes of each example, with labels and scores if there are any.

    Raises:
        InvalidArgument: An output is not valid for ``classifier.cc``.
    """
    labels: Any = None
    scores: Array | None = None
    for tensor in outputs:
        is_classes = tensor.name == _CLASSES
        wanted = Datatype.BYTES if is_classes else Datatype.FP32
        _check(tensor, wanted, "classes" if is_classes else "scores", examples)
        if is_classes:
            labels = [_texts_of(row) for row in tensor.data]
        else:
            scores = tensor.data
            known = servable.labels.get(tensor.name, ())
            if known and labels is None and len(known) == tensor.data.shape[1]:
                labels = [known] * examples
    if labels is not None and scores is not None and scores.shape[1:] != (len(labels[0]),):
        raise InvalidArgument(
            f"Tensors class and score should match in dim_size(1). Got {len(labels[0])} vs. "
            f"{scores.shape[1]}"
        )
    return Classes(labels, scores)


def _texts_of(labels: Array) -> list[str]:
    offload.checkpoint()
    try:
        return [label.decode() for label in labels]
    except UnicodeDecodeError as error:
        raise InvalidArgument("a label of output 'classes' is not UTF-8") from error


def _check(tensor: Tensor, wanted: Datatype, what: str, examples: int) -> None:
    shape = tensor.data.shape
    if len(shape) != 2:
        raise InvalidArgument(
            f"Expected Tensor shape: [batch_size num_classes] but got {dims_text(shape)}"
        )
    if tensor.datatype is not wanted:
        raise InvalidArgument(
            f"Expected {what} Tensor of DT_{type_name(wanted).upper()}. Got: "
            f"DT_{type_name(tensor.datatype).upper()}"
        )
    if shape[0] != examples:
        raise InvalidArgument(f"Expected {what} output batch size of {examples}. Got: {shape[0]}")


def regression_output(servable: ServableSignature) -> tuple[str, ...]:
    """Return the output ``outputs``, or the model's only one.

    Raises:
        InvalidArgument: The model has several, none of them of that name.
    """
    if _REGRESSION in servable.outputs:
        return (_REGRESSION,)
    if len(servable.outputs) != 1:
        raise InvalidArgument("Expected one output Tensor.")
    return tuple(servable.outputs)


def regress(outputs: Sequence[Tensor], _: ServableSignature, examples: int) -> Array:
    """Interpret the output as a value for each example.

    Raises:
        InvalidArgument: The output is not valid for ``regressor.cc``.
    """
    (tensor,) = outputs
    shape = tensor.data.shape
    if shape[1:] not in ((), (1,)) or not shape:
        raise InvalidArgument(
            "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got "
            f"{dims_text(shape)}"
        )
    if shape[0] != examples:
        raise InvalidArgument(
            f"Input batch size did not match output batch size: {examples} vs. {shape[0]}"
        )
    if tensor.datatype is not Datatype.FP32:
        raise InvalidArgument(
            f"Expected output Tensor of DT_FLOAT.  Got: DT_{type_name(tensor.datatype).upper()}"
        )
    return tensor.data.reshape(-1)
