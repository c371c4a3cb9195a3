"""The models of a server as clients see them, and the arrays that they send and get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, Tensor

#: The value of a request parameter.
Parameter = bool | int | str


class ClientRequest(NamedTuple):
    """An inference request; an empty ``version`` is the default one, no ``outputs`` are all."""

    model: str
    version: str
    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()
    class_count: int = 0
    parameters: Mapping[str, Parameter] | None = None
    id: str = ""


class TensorDescription(NamedTuple):
    """An input or output of a model; -1 in ``shape`` is a dynamic size, the batch's included."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


class ModelDescription(NamedTuple):
    """A model as its server describes it."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorDescription, ...]
    outputs: tuple[TensorDescription, ...]


class ModelStatus(NamedTuple):
    """A version of a model in the server's index; ``state`` is ``READY`` if it answers.

    ``reason`` tells why it does not.
    """

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class DurationStatistics:
    """A count of events, and the sum of their durations in nanoseconds."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """The requests to a version of a model since it was loaded, as Triton counts them.

    Attributes:
        last_inference: milliseconds since the epoch; 0: none.
        inference_count: rows of the requests that succeeded; a batch of eight counts as eight.
        execution_count: executions of the model, each of one or several requests.
        inference_stats: by ``success``, ``fail``, ``queue``, ``compute_input``, ``compute_infer``,
            ``compute_output``, ``cache_hit`` and ``cache_miss``.
        batch_stats: by batch size, the durations of its executions.
    """

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: Mapping[str, DurationStatistics]
    batch_stats: Mapping[int, Mapping[str, DurationStatistics]]


def counted(row: dict[str, Any]) -> ModelStatistics:
    """The statistics in one row that a server sent."""

    return ModelStatistics(
        name=str(row["name"]),
        version=str(row["version"]),
        last_inference=int(row.get("last_inference", 0)),
        inference_count=int(row.get("inference_count", 0)),
        execution_count=int(row.get("execution_count", 0)),
        inference_stats=_durations(row.get("inference_stats") or {}),
        batch_stats={
            int(each["batch_size"]): _durations(each) for each in row.get("batch_stats") or ()
        },
    )


def _durations(document: Mapping[str, Any]) -> dict[str, DurationStatistics]:
    return {
        name: DurationStatistics(int(each.get("count", 0)), int(each.get("ns", 0)))
        for name, each in document.items()
        if isinstance(each, dict)
    }


def described(document: dict[str, Any]) -> ModelDescription:
    """The description in the metadata that a server sent."""
    inputs, outputs = (
        tuple(
            TensorDescription(
                tensor["name"],
                Datatype(tensor["datatype"]),
                tuple(int(size) for size in tensor.get("shape", ())),
            )
            for tensor in document.get(side) or ()
        )
        for side in ("inputs", "outputs")
    )
    versions = tuple(document.get("versions") or ())
    return ModelDescription(
        document["name"], versions, document.get("platform", ""), inputs, outputs
    )


def encoded(known: ModelDescription, name: str, value: ArrayLike) -> Tensor:
    """``value`` as the model's input ``name``.

    Raises:
        InvalidArgument: there is no such input, or a value does not fit.
    """
    tensors = {tensor.name: tensor for tensor in known.inputs}
    if name not in tensors:
        raise InvalidArgument(
            f"model '{known.name}' has no input '{name}'; its inputs are {', '.join(tensors)}"
        )
    datatype = tensors[name].datatype
    try:
        array = as_datatype(value, datatype)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InvalidArgument(f"input '{name}' is not {datatype}: {error}") from error
    return Tensor(name, datatype, _bfloat16(array) if datatype is Datatype.BF16 else array)


def as_datatype(value: ArrayLike, datatype: Datatype) -> Array:
    """``value`` as an array of ``datatype``: BYTES as objects, BF16 as ``float32``.

    Raises:
        TypeError, ValueError, ArithmeticError: a value does not fit.
    """
    if datatype is Datatype.BYTES:
        texts: Array = np.array(value, dtype=object)
        encoded = [item.encode() if isinstance(item, str) else item for item in texts.flat]
        texts.reshape(-1)[:] = encoded
        return texts
    array = np.asarray(value)
    wanted = np.dtype(np.float32) if datatype is Datatype.BF16 else NUMPY_DTYPES[datatype]
    with np.errstate(over="raise"):  # no infinity for a number that is too large
        fitted = array.astype(wanted, casting="same_kind", copy=False)
    if wanted.kind in "iu" and array.dtype != wanted and not np.array_equal(fitted, array):
        raise ValueError("a value does not fit")
    return np.ascontiguousarray(fitted)


def _bfloat16(array: Array) -> Array:
    """The bits of ``array``, ``float32``, rounded to the nearest bfloat16, ties to even."""
    bits = array.view(np.uint32)
    half = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    rounded = np.where(np.isnan(array), bits | 0x400000, bits + half)
    return (rounded >> 16).astype(np.uint16)


def plain(datatype: Datatype, array: Array) -> Array:
    """``array`` in a type of NumPy's own: BF16 as ``float32``."""
    if datatype is Datatype.BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array
