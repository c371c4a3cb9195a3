"""The words of the house: tensors, requests, responses, signatures, deadlines, and ``Infer``.

Everything past the wire is one callable, ``Infer``; a backend is one, and every stage in front of
a backend wraps one. numpy and the standard library only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Parameter = bool | int | float | str
#: The value types a protocol may carry in ``parameters``.


class Datatype(StrEnum):
    """Open Inference Protocol datatypes; the value is the word on the wire."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BF16 = "BF16"
    BYTES = "BYTES"


#: In memory BF16 is its bit pattern (numpy has no bfloat16) and BYTES an object array of ``bytes``.
NUMPY_DTYPES: Mapping[Datatype, np.dtype[Any]] = {
    Datatype.BOOL: np.dtype("?"),
    Datatype.UINT8: np.dtype("u1"),
    Datatype.UINT16: np.dtype("<u2"),
    Datatype.UINT32: np.dtype("<u4"),
    Datatype.UINT64: np.dtype("<u8"),
    Datatype.INT8: np.dtype("i1"),
    Datatype.INT16: np.dtype("<i2"),
    Datatype.INT32: np.dtype("<i4"),
    Datatype.INT64: np.dtype("<i8"),
    Datatype.FP16: np.dtype("<f2"),
    Datatype.FP32: np.dtype("<f4"),
    Datatype.FP64: np.dtype("<f8"),
    Datatype.BF16: np.dtype("<u2"),
    Datatype.BYTES: np.dtype("O"),
}


@dataclass(frozen=True, slots=True)
class Axis:
    """A named dynamic dimension, bounds inclusive. ``maximum`` None: unbounded.

    ``padding`` says that inputs may be made longer along it, at their end, and that no answer
    changes but for being longer too: the value to put there, or one for each input by name. None:
    it may not.
    """

    name: str
    minimum: int = 1
    maximum: int | None = None
    padding: float | tuple[tuple[str, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    ``dims`` exclude the batch dimension where the model batches; a dynamic dimension is -1, or the
    name of an ``Axis``. ``minimum`` and ``maximum`` bound the *values* (inclusive); ``maximum`` may
    name an axis: the value may not exceed that axis' size in the same request. ``reshape`` is
    Triton's: the dims the model itself wants, when the wire's differ (a scalar per batch element
    travels as ``[1]`` and reaches the model as ``[]``).
    """

    name: str
    datatype: Datatype
    dims: tuple[int | str, ...]
    minimum: float | None = None
    maximum: float | str | None = None
    reshape: tuple[int, ...] | None = None
    optional: bool = False

    @property
    def wire_dims(self) -> tuple[int, ...]:
        """``dims`` with every named axis as -1."""
        return tuple(-1 if isinstance(d, str) else d for d in self.dims)

    @property
    def model_dims(self) -> tuple[int, ...]:
        """The dims that the model itself sees; -1 where they are dynamic."""
        return self.wire_dims if self.reshape is None else self.reshape


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """What a model takes and gives. ``max_batch_size`` 0: ``dims`` are the whole shape.

    ``any_shape``: the model itself decides which shapes it takes; ``dims`` are the usual ones.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    axes: Mapping[str, Axis] = field(default_factory=dict)
    any_shape: bool = False


@dataclass(slots=True)
class Tensor:
    """A named array. ``data`` has the tensor's shape; BF16 is uint16 bits, BYTES objects."""

    name: str
    datatype: Datatype
    data: Array


@dataclass(slots=True)
class Timing:
    """Where a request's nanoseconds went; filled by the stages, read by the statistics.

    A cache that looked the request up sets one of ``cache_hit_ns`` and ``cache_miss_ns``.
    ``counted``: the batcher has counted the execution, be it of this request alone.
    """

    queue_ns: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    cache_hit_ns: int = 0
    cache_miss_ns: int = 0
    counted: bool = False


@dataclass(slots=True)
class InferRequest:
    """One inference. ``outputs`` empty: all of them. ``model_version`` 0: the newest ready one.

    ``classification`` maps an output to how many of its largest values are wanted in its place.
    ``trace`` names the request in the logs where the client gave no ``id``; it is never echoed.
    ``signature`` is one of the model's own (those of a SavedModel), and tensors then have the
    model's shapes; empty: the one that the configuration declares. ``via`` are the gateways that it
    has come through.
    """

    model_name: str
    inputs: list[Tensor]
    outputs: tuple[str, ...] = ()
    model_version: int = 0
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    classification: Mapping[str, int] = field(default_factory=dict)
    trace: str = ""
    timing: Timing = field(default_factory=Timing)
    signature: str = ""
    via: str = ""


@dataclass(slots=True)
class InferResponse:
    """``outputs`` in the order requested, else in the signature's order."""

    model_name: str
    model_version: int
    outputs: list[Tensor]
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


class Deadline:
    """An absolute moment on the monotonic clock; it only ever comes nearer."""

    __slots__ = ("at",)

    def __init__(self, at: float | None = None) -> None:
        self.at = at

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def earliest(self, seconds: float | None) -> Deadline:
        """This deadline, or ``seconds`` from now if that is sooner."""
        if seconds is None:
            return self
        other = time.monotonic() + seconds
        return self if self.at is not None and self.at <= other else Deadline(other)

    def remaining(self) -> float | None:
        """Seconds left (never negative), or None if there is no deadline."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return self.at is not None and time.monotonic() >= self.at


NO_DEADLINE = Deadline()

Infer = Callable[[InferRequest, Deadline], Awaitable[InferResponse]]
#: Any number of responses to one request, made as they are asked for. Whoever stops asking closes
#: it (``aclose``), and the work stops.
InferStream = Callable[[InferRequest, Deadline], AsyncGenerator[InferResponse, None]]
