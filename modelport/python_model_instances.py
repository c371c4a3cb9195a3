"""Instances of models that ``@modelport.model`` declares, with the interface of Triton's."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import triton_python_backend_utils as pb_utils
from modelport.gateway.errors import InvalidArgument

if TYPE_CHECKING:
    from modelport.python_models import ModelDefinition

#: Between two looks at a stream whose client does not read.
_PAUSE_SECONDS = 0.01
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class _Call(NamedTuple):
    """A call of the model: the numbers of the requests that it answers, and their rows."""

    numbers: list[int]
    rows: list[int] | None
    arguments: dict[str, Any]


class DeclaredModel:
    """An instance of a declared model, with the interface of one of ``TritonPythonModel``."""

    #: Whether its coroutines answer several batches at a time, and may be cancelled.
    interruptible = False
    #: Whether the requests of a batch that has failed are tried one by one.
    separable = False
    #: The check of a class that has one.
    is_ready: Any

    def __init__(self, definition: ModelDefinition) -> None:
        self._definition = definition
        self._object: Any = None
        self._function: Any = definition.target

    def initialize(self, args: Mapping[str, str]) -> None:
        """Make the object of a class, and load it."""
        if not inspect.isclass(self._definition.target):
            return
        self._object = self._definition.target()
        self._function = self._object.predict
        if hasattr(self._object, "is_ready"):
            self.is_ready = self._object.is_ready
        if hasattr(self._object, "load"):
            self._object.load()

    def finalize(self) -> Any:
        """Unload the object of a class."""
        return self._object.unload() if hasattr(self._object, "unload") else None

    def _calls(
        self,
        requests: Sequence[pb_utils.InferenceRequest],
        responses: dict[int, pb_utils.InferenceResponse],
    ) -> Iterator[_Call]:
        """The calls that answer ``requests``: one for all with equal inputs, but for their rows.

        Requests with wrong inputs are answered at once.
        """
        alike: dict[Any, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            inputs = frozenset((t.name(), *t.shape()[1:]) for t in request.inputs())
            alike[inputs if self._definition.batch else number].append(number)
        for numbers in alike.values():
            yield from self._joined(numbers, requests, responses)

    def _joined(
        self,
        numbers: list[int],
        requests: Sequence[pb_utils.InferenceRequest],
        responses: dict[int, pb_utils.InferenceResponse],
    ) -> Iterator[_Call]:
        """The call that answers the requests ``numbers``, or one for each that can be answered."""
        some = [requests[number] for number in numbers]
        try:
            arguments = self._definition.arguments(some)
        except InvalidArgument as error:
            if len(numbers) > 1:  # one client's input fails no other client's request
                for number in numbers:
                    yield from self._joined([number], requests, responses)
            else:
                wrong = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
                responses[numbers[0]] = pb_utils.InferenceResponse(error=wrong)
            return
        batched = self._definition.batch > 0
        rows = [each.inputs()[0].shape()[0] for each in some] if batched else None
        yield _Call(numbers, rows, arguments)

    def _answer(
        self, call: _Call, returned: Any, responses: dict[int, pb_utils.InferenceResponse]
    ) -> None:
        """Add the responses of ``call`` to ``responses``."""
        total = sum(call.rows) if call.rows else None
        arrays = self._definition.arrays(returned, total)
        start = 0
        for number, rows in zip(call.numbers, call.rows or (None,), strict=True):
            some = slice(start, start + rows) if rows else ...
            responses[number] = _response({name: array[some] for name, array in arrays.items()})
            start += rows or 0


def _response(arrays: Mapping[str, Any]) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([pb_utils.Tensor(*pair) for pair in arrays.items()])


class SingleResponseModel(DeclaredModel):
    """A function."""

    separable = True

    def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        """Answer each request once."""
        responses: dict[int, pb_utils.InferenceResponse] = {}
        for call in self._calls(requests, responses):
            self._answer(call, self._function(**call.arguments), responses)
        return [responses[number] for number in range(len(requests))]


class AsyncModel(DeclaredModel):
    """An ``async`` function."""

    interruptible = separable = True

    async def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        """Answer each request once."""
        responses: dict[int, pb_utils.InferenceResponse] = {}
        for call in self._calls(requests, responses):
            self._answer(call, await self._function(**call.arguments), responses)
        return [responses[number] for number in range(len(requests))]


class StreamingModel(DeclaredModel):
    """A generator."""

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        """Send the responses to each request."""
        for request in requests:
            sender = request.get_response_sender()
            for value in self._function(**self._definition.arguments([request])):
                sender.send(_response(self._definition.arrays(value)))
                if sender.is_cancelled():
                    break
            sender.send(flags=_FINAL)


class AsyncStreamingModel(DeclaredModel):
    """An ``async`` generator."""

    interruptible = True

    async def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        """Send the responses to each request."""
        for request in requests:
            sender = request.get_response_sender()
            async with _closing(self._function(**self._definition.arguments([request]))) as values:
                async for value in values:
                    while sender.is_blocked():  # a slow client holds up no other
                        await asyncio.sleep(_PAUSE_SECONDS)
                    sender.send(_response(self._definition.arrays(value)))
                    if sender.is_cancelled():
                        break
            sender.send(flags=_FINAL)


@contextlib.asynccontextmanager
async def _closing(values: Any) -> AsyncIterator[Any]:
    """``values``, closed at the end if they are a generator."""
    try:
        yield values
    finally:
        if inspect.isasyncgen(values):
            await values.aclose()


#: Whether the model streams, and whether it is asynchronous → its kind of instances.
KINDS: Mapping[tuple[bool, bool], type[DeclaredModel]] = {
    (False, False): SingleResponseModel,
    (False, True): AsyncModel,
    (True, False): StreamingModel,
    (True, True): AsyncStreamingModel,
}
