"""Requests, responses, and the sender of a request's responses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triton_python_backend_utils._errors import TritonError, TritonModelException
from triton_python_backend_utils._runtime import Current
from triton_python_backend_utils._tensors import Tensor

FLAG_SEQUENCE_START, FLAG_SEQUENCE_END = 1, 2
RESPONSE_COMPLETE_FINAL = 1
RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2
MEMORY_GPU, MEMORY_CPU = 0, 1


class PreferredMemory:
    """The memory in which the outputs of a BLS request are wanted; here always the CPU's."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request."""

    def __init__(self, context: str | None = None) -> None:
        self._context = context

    def get_context(self) -> str | None:
        """The trace's context, if the client has sent one."""
        return self._context


class InferenceResponse:
    """The response to a request: outputs, or an error."""

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._outputs = list(output_tensors)
        for tensor in self._outputs:
            if tensor is None:
                raise TritonModelException(
                    "Output tensor for inference response should not be empty."
                )
            if not isinstance(tensor, Tensor):
                raise TypeError(f"output_tensors: expected a Tensor, found type {type(tensor)}")
            if not tensor._name:
                raise TritonModelException("Tensor name cannot be an empty string.")
        self._error = error
        self._parameters = "{}" if parameters is None else _parameters_json(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The response's parameters as a JSON object."""
        return self._parameters


class RequestOrigin:
    """The place that a request came from: it takes responses and knows who still waits.

    This one is of a request that a program or a test has made itself: responses stay in the list
    ``responses``.
    """

    decoupled = True

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []

    def sender(self, request: InferenceRequest) -> InferenceResponseSender:
        """The sender of the responses to ``request``."""
        return InferenceResponseSender(self, request.number)

    def is_cancelled(self, number: int) -> bool:
        """Whether nobody waits for the responses to a request any more."""
        return False

    def is_blocked(self, number: int) -> bool:
        """Whether ``send`` would wait, because too many responses to a request are unread."""
        return False

    def send(self, number: int, response: InferenceResponse | None, final: bool) -> None:
        """Send a response to a request, and the end if it is ``final``."""
        if response is not None:
            self.responses.append(response)

    def forget(self, number: int, answered: bool) -> None:
        """End a request whose sender is gone without having sent the end."""


class InferenceRequest:
    """A request: one that ``execute`` gets, or one to send to another model (BLS)."""

    __slots__ = (
        "__weakref__", "_correlation_id", "_flags", "_inputs", "_model_name", "_model_version",
        "_outputs", "_parameters", "_preferred_memory", "_release_flags", "_request_id", "_timeout",
        "_trace", "number", "origin", "sender",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Make a request; ``inputs``, ``requested_output_names`` and ``model_name`` are required.

        Raises:
            TypeError: one is missing, or an argument has the wrong type.
            TritonModelException: an input is None, or a parameter has a wrong type.
        """
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError(
                "__init__(): incompatible constructor arguments: an InferenceRequest needs inputs, "
                "requested_output_names and model_name"
            )
        for number in (model_version, flags, timeout):
            if not isinstance(number, int):
                raise TypeError(f"__init__(): incompatible constructor arguments: {number!r}")
        request_id, model_name = _text(request_id), _text(model_name)
        if not isinstance(correlation_id, int):
            correlation_id = _text(correlation_id)
        self._inputs = list(inputs)
        for tensor in self._inputs:
            if tensor is None:
                raise TritonModelException(
                    f"Input tensor for request with id '{request_id}' and model name "
                    f"'{model_name}' should not be empty."
                )
        self._request_id, self._correlation_id = request_id, correlation_id
        self._outputs = set(map(_text, requested_output_names))
        self._model_name, self._model_version = model_name, model_version
        self._flags, self._timeout, self._release_flags = flags, timeout, RELEASE_ALL
        self._preferred_memory, self._trace = preferred_memory, trace or InferenceTrace()
        self._parameters = _parameters_json(parameters)
        self.origin: RequestOrigin = RequestOrigin()
        #: The request's number at its origin, and the sender once the model has asked for it.
        self.number = 0
        self.sender: InferenceResponseSender | None = None

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        """The request's own timeout in microseconds; 0: none."""
        return self._timeout

    def parameters(self) -> str:
        """The request's own parameters as a JSON object."""
        return self._parameters

    def trace(self) -> InferenceTrace:
        return self._trace

    def requested_output_names(self) -> set[str]:
        """The outputs that the client wants: all of the model's if it names none."""
        return self._outputs

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return self._model_version

    def set_release_flags(self, flags: int) -> None:
        """Set what happens to the request when ``execute`` returns."""
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException("Unable to set release flags. Unsupported flags provided.")
        self._release_flags = flags

    def release_flags(self) -> int:
        return self._release_flags

    def is_cancelled(self) -> bool:
        """Whether the client has gone, or its deadline has passed."""
        return self.origin.is_cancelled(self.number)

    def get_response_sender(self) -> InferenceResponseSender:
        """The sender of the responses, which may send after ``execute`` has returned."""
        if self.sender is None:
            self.sender = self.origin.sender(self)
        return self.sender

    def exec(self, decoupled: bool = False) -> Any:
        """Send the request to ``model_name`` and wait for its response.

        With ``decoupled``, an iterator over the responses. An error is in the response, not raised.
        """
        runtime = Current.runtime
        return ResponseIterator(runtime.stream(self)) if decoupled else runtime.infer(self)

    async def async_exec(self, decoupled: bool = False) -> Any:
        """``exec`` that does not block the running event loop until the first response."""
        runtime = Current.runtime
        if decoupled:
            return ResponseIterator(await runtime.stream_async(self))
        return await runtime.infer_async(self)


class InferenceResponseSender:
    """Sends the responses to one request, from any thread."""

    __slots__ = ("_closed", "_lock", "_number", "_origin", "_sent")

    def __init__(self, origin: RequestOrigin, number: int) -> None:
        # Not the request, which refers to the sender: a cycle would outlive both.
        self._origin, self._number = origin, number
        self._lock = threading.Lock()
        self._closed, self._sent = False, 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send ``response``, and the end with ``TRITONSERVER_RESPONSE_COMPLETE_FINAL``.

        Raises:
            TritonModelException: the sender is closed, or the model may not send this.
        """
        if flags not in (0, RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        with self._lock:
            self._check(response)
            self._closed = bool(flags)
            self._sent += response is not None
        self._origin.send(self._number, response, bool(flags))

    def _check(self, response: InferenceResponse | None) -> None:
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if self._origin.decoupled:
            return
        if response is not None and self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if response is None and not self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before "
                "sending a response."
            )

    def is_blocked(self) -> bool:
        """Whether ``send`` would wait, because too many responses are unread."""
        return self._origin.is_blocked(self._number)

    def close(self) -> None:
        """Refuse further responses."""
        with self._lock:
            self._closed = True

    @property
    def closed(self) -> bool:
        """Whether the end is sent."""
        return self._closed

    def is_cancelled(self) -> bool:
        """Whether the client has gone, or its deadline has passed."""
        return self._origin.is_cancelled(self._number)

    def __del__(self) -> None:
        if not self._closed:
            self._closed = True
            self._origin.forget(self._number, bool(self._sent))


class ResponseIterator:
    """The responses of a decoupled model, one after the other.

    An iteration goes on where the one before it has stopped; after the last response, it begins
    with the first one again.
    """

    def __init__(self, source: Iterator[InferenceResponse]) -> None:
        self._responses: list[InferenceResponse] = []
        self._source = source
        self._finished = False
        self._next = 0

    def __iter__(self) -> Iterator[InferenceResponse]:
        if self._finished and self._next == len(self._responses):
            self._next = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._next == len(self._responses):
            if self._finished:
                raise StopIteration
            try:
                self._responses.append(next(self._source))
            except StopIteration:
                self._finished = True
                raise
        self._next += 1
        return self._responses[self._next - 1]

    def cancel(self) -> None:
        """Cancel the request; its last response is an error with the code CANCELLED."""
        if self._finished:
            return
        self._finished = True
        cancelled = TritonError("the request is cancelled", TritonError.CANCELLED)
        self._responses.append(InferenceResponse([], cancelled))
        close = getattr(self._source, "close", None)
        if close is not None:
            close()


def _text(value: Any) -> str:
    """A text, which may come as an element of a BYTES tensor."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"__init__(): incompatible constructor arguments: {value!r} is no string")
    return value


def _parameters_json(parameters: Mapping[str, Any] | None) -> str:
    if parameters is None:
        return "{}"
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
        if not isinstance(value, bool | int | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
    return json.dumps(parameters)
