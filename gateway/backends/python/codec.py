"""Requests and responses of the gateway ↔ frames of a worker.

A worker may run any code, so everything in its frames is checked: the shape of the JSON, names,
datatypes and sizes. Outputs that differ from the model's configuration are passed on, as in Triton.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson
import structlog

from modelport.gateway.backends.python_worker import frames
from modelport.gateway.backends.python_worker.errors import CODES
from modelport.gateway.backends.python_worker.frames import FrameError, OutgoingFrame
from modelport.gateway.backends.python_worker.regions import Buffer, SentRegions, aligned
from modelport.gateway.errors import (
    AlreadyExists,
    Cancelled,
    Internal,
    InvalidArgument,
    ModelportError,
    NotFound,
    Unavailable,
    Unknown,
    Unsupported,
)
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import scheduler_tensors
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import (
    Datatype,
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
    dims_text,
    fits,
)
from modelport.gateway.wire import raw_tensors

log = structlog.get_logger("modelport.python")


class ModelAnswered(ModelportError):
    """An error that a model has answered with, by ``TritonError`` or by an exception."""


def _answered(kind: type[ModelportError]) -> type[ModelAnswered]:
    return type(f"Answered{kind.__name__}", (ModelAnswered, kind), {"code": kind.code})


#: By the codes of ``TritonError``.
_ERRORS = tuple(map(_answered, (
    Unknown, Internal, NotFound, InvalidArgument, Unavailable, Unsupported, AlreadyExists,
    Cancelled,
)))  # fmt: skip
_INTERNAL = 1
#: Parameters that a model sees by methods of the request, or not at all.
_OWN = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"}
)
_MAX_OUTPUTS = 4096
#: Of descriptions that are likely to come again.
_REPEATED_BYTES = 1024


def describe(tensors: Sequence[Tensor], buffers: list[Buffer]) -> list[Any]:
    """The rows of ``tensors`` in a frame; their contents are added to ``buffers``."""
    rows = []
    for tensor in tensors:
        content = raw_tensors.encode(tensor)
        buffers.append(content)
        rows.append([tensor.name, tensor.datatype, tensor.data.shape, len(content)])
    return rows


def request_frame(
    number: int, requests: Sequence[InferRequest], regions: SentRegions
) -> OutgoingFrame:
    """The frame of a batch, whose requests have consecutive numbers from ``number``.

    Raises:
        InvalidArgument: the texts of a request are too large.
        Unavailable: there is no memory for the tensors.
    """
    buffers: list[Buffer] = []
    rows = [
        [describe(each.inputs, buffers), each.outputs or None, _extra(each)] for each in requests
    ]
    try:
        return frames.pack(frames.INFER, number, 0, orjson.dumps(rows), buffers, regions)
    except frames.TooLarge as error:
        raise InvalidArgument(str(error)) from error
    except OSError as error:
        raise Unavailable(f"there is no memory for tensors: {error.strerror}") from error


def _extra(request: InferRequest) -> list[Any] | None:
    """Id, correlation id, flags, timeout, parameters and trace; None: all have their defaults."""
    parameters, span = request.parameters, request.span
    trace = None if span is None else orjson.dumps(dict(span.headers())).decode()
    if not parameters:
        return [request.id, 0, 0, 0, "{}", trace] if request.id or trace else None
    flags = bool(parameters.get("sequence_start")) | bool(parameters.get("sequence_end")) << 1
    own = {key: value for key, value in parameters.items() if key not in _OWN}
    sequence, timeout = parameters.get("sequence_id", 0), parameters.get("timeout", 0)
    return [request.id, sequence, flags, timeout, orjson.dumps(own).decode(), trace]


def parsed(meta: bytes) -> Any:
    """The JSON of a frame; raises ``FrameError``."""
    try:
        return orjson.loads(meta)
    except ValueError as error:
        raise FrameError("a frame is not JSON") from error


class DescribedTensor(NamedTuple):
    """A tensor as a worker describes it, and its size in bytes."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    size: int


class DescribedResponse(NamedTuple):
    """A response as a worker describes it: an error with its code, or tensors."""

    error: tuple[str, int] | None
    tensors: Sequence[DescribedTensor]
    parameters: Any


#: The model wants to get the request again.
RESCHEDULED = DescribedResponse(None, (), None)


def described_tensors(rows: Any) -> list[DescribedTensor]:
    """Check descriptions of tensors; raises ``FrameError``."""
    if type(rows) is not list or len(rows) > _MAX_OUTPUTS:
        raise FrameError("a frame has too many tensors, or none")
    found = []
    for row in rows:
        try:
            name, datatype, shape, size = row
            kind = raw_tensors.parse_datatype(name, datatype)
            dims = raw_tensors.parse_shape(name, shape)
            if type(name) is not str or type(size) is not int or not size >= 0:
                raise ValueError(name)
            if kind is Datatype.BOOL and size != math.prod(dims):
                raise ValueError("wrong size")
        except (TypeError, ValueError, InvalidArgument) as error:
            raise FrameError("a tensor is described wrongly") from error
        found.append(DescribedTensor(name, kind, dims, size))
    return found


def described(row: Any) -> DescribedResponse | None:
    """Check the description of a response; None: its sender sends it.

    Raises:
        FrameError: it is none.
    """
    if row is None:
        return None
    if row == [2]:
        return RESCHEDULED
    if type(row) is not list or len(row) != 3 or row[0] not in (0, 1):
        raise FrameError("a response is described wrongly")
    if not row[0]:
        return DescribedResponse(None, described_tensors(row[1]), row[2])
    _, message, code = row
    if type(message) is not str or type(code) is not int or not 0 <= code < len(_ERRORS):
        raise FrameError("an error is described wrongly")
    return DescribedResponse((message, code), (), None)


@functools.lru_cache(256)
def _described(meta: bytes) -> list[DescribedResponse | None]:
    """Descriptions without texts of their own, which others repeat."""
    rows = parsed(meta)
    if type(rows) is not list:
        raise FrameError("a result is not described by a list")
    return [described(row) for row in rows]


def described_batch(meta: bytes) -> Sequence[DescribedResponse | None]:
    """Check the descriptions of a batch's responses; raises ``FrameError``."""
    return _described(meta) if len(meta) <= _REPEATED_BYTES else _described.__wrapped__(meta)


def tensors_of(
    rows: Sequence[DescribedTensor], content: Any, offset: int
) -> tuple[list[Tensor], int]:
    """The described tensors, as views of ``content``, and the place after the last.

    Raises:
        FrameError: the content does not fit.
    """
    size_of_all = 0 if content is None else len(content)
    tensors = []
    for name, kind, shape, size in rows:
        if size > size_of_all - offset:
            raise FrameError("a tensor is longer than its content")
        part: Any = memoryview(content)[offset : offset + size] if size else b""
        try:
            array = raw_tensors.decode(name, kind, shape, part)
        except InvalidArgument as error:
            raise FrameError("a tensor is described wrongly") from error
        tensors.append(Tensor(name, kind, array))
        offset += aligned(size)
    return tensors, offset


def error_row(error: ModelportError, reason: ModelportError) -> list[Any]:
    """The error of a reply to a call: Triton's, whose code is always INTERNAL, and its reason."""
    return [1, str(error), _INTERNAL, str(reason), CODES.get(reason.code, _INTERNAL)]


class ResponseDecoder:
    """Makes responses of what a worker sends, and compares them with the configuration.

    A difference is an error if ``strict``, or if the output has to be reshaped. Else the output is
    passed on, as in Triton, and the log says so once.
    """

    def __init__(self, name: str, version: int, config: ModelConfig, strict: bool = False) -> None:
        self._name, self._version, self._strict = name, version, strict
        self._told: set[str] = set()
        signature = configuration.signature(scheduler_tensors.declared(config))
        self._batched = signature.max_batch_size > 0
        self._outputs = {s.name: (s.datatype, s.model_dims) for s in signature.outputs}
        self._names = tuple(self._outputs)
        self._reshaped = {s.name for s in signature.outputs if s.wire_dims != s.model_dims}
        self._decoupled = bool(config.model_transaction_policy.decoupled)

    def response(
        self, row: DescribedResponse, content: Any, offset: int, request: InferRequest
    ) -> tuple[InferResponse | ModelportError, int]:
        """The response to ``request``, and the place after its tensors.

        Raises:
            FrameError: the content does not fit.
        """
        if row.error is not None:
            message, code = row.error
            return _ERRORS[code](message), offset
        tensors, offset = tensors_of(row.tensors, content, offset)
        try:
            outputs = self._checked(tensors, request)
        except Internal as error:
            return error, offset
        if row.parameters is None:
            return InferResponse(self._name, self._version, outputs), offset
        try:
            found = _parameters(row.parameters)
        except Internal as error:
            return error, offset
        return InferResponse(self._name, self._version, outputs, parameters=found), offset

    def _checked(self, tensors: Sequence[Tensor], request: InferRequest) -> list[Tensor]:
        """The wanted outputs in their order; raises ``Internal`` if they cannot be passed on."""
        by_name = {tensor.name: tensor for tensor in tensors}
        if len(by_name) != len(tensors):
            names = [tensor.name for tensor in tensors]
            twice = next(name for name in names if names.count(name) > 1)
            raise Internal(f"output '{twice}' is in the model's response twice")
        batch = request.inputs[0].data.shape[:1] if self._batched and request.inputs else ()
        outputs, missing = [], ""
        for name in request.outputs or self._names:
            tensor = by_name.get(name)
            if tensor is None:
                missing = missing or name
                continue
            datatype, dims = self._outputs[name]
            shape = tensor.data.shape
            wanted = batch + dims
            if tensor.datatype is not datatype:
                self._differs(name, f"must be {datatype}, but the model returns {tensor.datatype}")
            if shape != wanted and not fits(shape, wanted):
                self._differs(
                    name,
                    f"must have shape {dims_text(wanted)}, but the model returns "
                    f"{dims_text(shape)}",
                )
            outputs.append(tensor)
        if missing and not self._decoupled:
            self._differs(missing, "is missing in the model's response", fatal=not outputs)
        return outputs

    def _differs(self, name: str, how: str, fatal: bool = False) -> None:
        if fatal or self._strict or name in self._reshaped:
            raise Internal(f"output '{name}' {how}")
        if name not in self._told:
            self._told.add(name)
            log.warning(
                "an output differs from config.pbtxt and is passed on",
                model=self._name, version=self._version, reason=f"output '{name}' {how}",
            )  # fmt: skip


def _parameters(parameters: Any) -> Mapping[str, Parameter]:
    if type(parameters) is not dict or any(
        type(value) not in (bool, int, float, str) for value in parameters.values()
    ):
        raise Internal("a parameter of the model's response is no bool, int, float or str")
    return dict(parameters)
