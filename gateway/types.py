"""Core types shared by every layer.

Past the wire, inference is one callable, ``Infer``: a backend is one, and every stage in front of a
backend wraps one. This module imports numpy and the standard library only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
T = TypeVar("T")
#: Types of the values in ``parameters``.
Parameter = bool | int | float | str


class Datatype(StrEnum):
    """Datatypes of the Open Inference Protocol, with their names on the wire."""

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


#: BF16 is held as its bit pattern (numpy has no bfloat16), BYTES as an object array of ``bytes``.
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
#: The names that numpy, PyTorch and TensorFlow have in common.
DTYPE_NAMES: Mapping[Datatype, str] = {
    **{datatype: dtype.name for datatype, dtype in NUMPY_DTYPES.items()},
    Datatype.BF16: "bfloat16",
    Datatype.BYTES: "string",
}


def fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether ``shape`` has the sizes of ``dims``, where -1 is any size."""
    if len(shape) != len(dims):
        return False
    for size, wanted in zip(shape, dims, strict=True):  # noqa: SIM110 - a generator costs more
        if wanted not in (-1, size):
            return False
    return True


def dims_text(shape: Sequence[int]) -> str:
    """Dims in Triton's format, on which clients match: ``[-1,16]``."""
    return f"[{','.join(map(str, shape))}]"


@dataclass(frozen=True, slots=True)
class Axis:
    """A named dynamic dimension with inclusive bounds; ``maximum`` None means unbounded.

    ``padding`` is the value with which inputs may be padded at the end of this axis, or one value
    for each input by name, if padding only makes the outputs longer. None forbids padding.
    """

    name: str
    minimum: int = 1
    maximum: int | None = None
    padding: float | tuple[tuple[str, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    ``dims`` exclude the batch dimension if the model batches; a dynamic dimension is -1, or the
    name of an ``Axis``. ``minimum`` and ``maximum`` are inclusive bounds of the *values*; if
    ``maximum`` names an axis, its size in the same request is the bound. ``reshape`` is Triton's:
    the dims of the model if they differ from the wire's (a scalar per batch element is ``[1]`` on
    the wire and ``[]`` in the model).
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
        """Dims on the wire, -1 for named axes."""
        return tuple(-1 if isinstance(d, str) else d for d in self.dims)

    @property
    def model_dims(self) -> tuple[int, ...]:
        """Dims in the model, -1 for dynamic ones."""
        return self.wire_dims if self.reshape is None else self.reshape


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Inputs and outputs of a model. With ``max_batch_size`` 0, ``dims`` are the whole shape.

    With ``any_shape`` only the model itself checks shapes, and ``dims`` are informative.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    axes: Mapping[str, Axis] = field(default_factory=dict)
    any_shape: bool = False


@dataclass(slots=True)
class Tensor:
    """A named array. ``data`` has the tensor's shape and a dtype of ``NUMPY_DTYPES``."""

    name: str
    datatype: Datatype
    data: Array

    @property
    def size_bytes(self) -> int:
        """Size of the content; the elements of BYTES tensors are objects of their own."""
        if self.datatype is Datatype.BYTES:
            return sum(map(len, self.data.flat))
        return int(self.data.nbytes)


@dataclass(slots=True)
class Timing:
    """Duration of each stage of a request, for the statistics.

    A cache sets either ``cache_hit_ns`` or ``cache_miss_ns``. ``counted`` tells whether the batcher
    has counted the execution, ``batch_size`` how many elements of one or more requests it had,
    ``begun`` whether the request waits for no instance any more, or that of ``joined``, its batch.
    """

    queue_ns: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    cache_hit_ns: int = 0
    cache_miss_ns: int = 0
    counted: bool = False
    begun: bool = False
    joined: Timing | None = None
    batch_size: int = 0


@dataclass(slots=True)
class InferRequest:
    """An inference request.

    Attributes:
        outputs: Requested outputs; empty for all.
        model_version: 0 for the newest version that is ready.
        classification: For an output, the number of largest values to return in its place.
        trace: Id in the logs if the client gave no ``id``; it is not echoed.
        signature: A signature of the SavedModel, with the model's own shapes, or ``text``; empty
            for the one of the configuration.
        via: The ``Via`` header: gateways that the request passed through.
        label: The version label by which the client chose ``model_version``; empty if it chose
            none, and the version is the default one. None if it named the version by number.
        unclassified: The outputs before their ``classification``; the service sets it.
        caller: The name of the caller, with whom others take turns (``--access``); empty for none.
        span: The span of the request, if it is part of a trace (``telemetry.spans``).
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
    label: str | None = None
    unclassified: list[Tensor] | None = None
    caller: str = ""
    span: Any = None


@dataclass(slots=True)
class InferResponse:
    """An inference response. ``outputs`` are in the requested order, or in the signature's.

    ``final``: a decoupled model has sent the end of its responses with this one.
    """

    model_name: str
    model_version: int
    outputs: list[Tensor]
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    final: bool = False


class Deadline:
    """A point in time on the monotonic clock, or none."""

    __slots__ = ("at",)

    def __init__(self, at: float | None = None) -> None:
        self.at = at

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def earliest(self, seconds: float | None) -> Deadline:
        """Return this deadline, or ``seconds`` from now if that is sooner."""
        if seconds is None:
            return self
        other = time.monotonic() + seconds
        return self if self.at is not None and self.at <= other else Deadline(other)

    def remaining(self) -> float | None:
        """Return the seconds left, at least 0, or None if there is no deadline."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return self.at is not None and time.monotonic() >= self.at


NO_DEADLINE = Deadline()

#: A stage that does not wait returns its response. An awaitable may have begun its work: it is
#: awaited at once, because nothing else ends what it holds.
Answer = InferResponse | Awaitable[InferResponse]
Infer = Callable[[InferRequest, Deadline], Answer]
#: Any number of responses to one request, generated on demand. A caller that stops early closes the
#: generator (``aclose``), which ends the work.
InferStream = Callable[[InferRequest, Deadline], AsyncGenerator[InferResponse, None]]


def finished(answer: T | Awaitable[T]) -> Awaitable[T]:
    """Make an awaitable of what is answered, or return the one that it is."""
    # ``isinstance`` would ask ``ABCMeta``, which costs ten times as much.
    return answer if hasattr(answer, "__await__") else _at_once(answer)


async def _at_once(answer: T) -> T:
    return answer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model that are sent to be loaded.

    Attributes:
        contents: by path in the model's folder.
        may_run_code: whether they may be code where those of a repository may.
    """

    contents: Mapping[str, bytes]
    may_run_code: bool


class Reshape:
    """Triton's ``reshape``: dynamic dims keep their sizes, in order."""

    def __init__(self, source: Sequence[int], target: Sequence[int], batched: bool) -> None:
        batch = (0,) if batched else ()
        dynamic = iter([i + len(batch) for i, d in enumerate(source) if d == -1])
        # For each target dim: a size, or ~index of the source dim with its size.
        self._plan = [~index for index in batch]
        self._plan += [~next(dynamic) if d == -1 else d for d in target]

    def __call__(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        shape = data.shape
        return data.reshape([shape[~step] if step < 0 else step for step in self._plan])
