"""A batcher over a model that the test holds in its hand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from modelport.gateway.backends.base import Execution
from modelport.gateway.errors import Internal
from modelport.gateway.inference.batching import Schedulers
from modelport.gateway.repository import config as configuration
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import (
    NO_DEADLINE,
    NUMPY_DTYPES,
    Datatype,
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
)
from tests.polling import WAIT_SECONDS

POISON = -1.0
CONFIG = """
name: "m"
backend: "fake"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""


class DoublingModelBackend:
    """``y = 2 x`` for every input and output of the configuration, in order.

    ``batches``: the first value of each row of each call that began. While held, calls wait.
    A row that begins with ``POISON`` fails the whole call.
    """

    problem = ""

    def __init__(self, config: Any, execution: Execution) -> None:
        self.config, self.execution = config, execution
        self.batches: list[list[Any]] = []
        self.requests: list[InferRequest] = []
        self.deadlines: list[Deadline] = []
        self.cancelled = self.running = self.most_at_once = 0
        self.error: BaseException | None = None
        #: Calls that begin with one of these wait all the same.
        self.blocked: set[float] = set()
        self._through = math.inf
        self._changed = asyncio.Condition()

    def hold(self) -> None:
        self._through = 0

    async def go_on(self, calls: float = math.inf) -> None:
        """Let the first ``calls`` of all calls through."""
        self._through = calls
        async with self._changed:
            self._changed.notify_all()

    async def begun(self, calls: int) -> None:
        """Wait until so many calls have begun."""
        async with asyncio.timeout(WAIT_SECONDS), self._changed:
            await self._changed.wait_for(lambda: len(self.batches) >= calls)

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        first = request.inputs[0].data
        number = len(self.batches) + 1
        self.batches.append([row.flat[0] if row.size else None for row in first])
        self.requests.append(request)
        self.deadlines.append(deadline)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            async with self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(
                    lambda: number <= self._through and first.flat[0] not in self.blocked
                )
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        return self.answer(request)

    def answer(self, request: InferRequest) -> InferResponse:
        if any(value == POISON for value in self.batches[-1]) and POISON in [
            row.flat[0] for row in request.inputs[0].data
        ]:
            raise Internal("poison")
        given = {tensor.name: tensor.data for tensor in request.inputs}
        outputs = {
            output.name: (input_.name, input_)
            for input_, output in zip(self.config.input, self.config.output, strict=True)
        }
        return InferResponse(
            "m",
            1,
            [
                Tensor(name, _datatype(outputs[name][1]), _twice(given[outputs[name][0]]))
                for name in request.outputs or outputs
                if outputs[name][0] in given
            ],
        )

    def unload(self) -> None: ...


def _datatype(declaration: Any) -> Datatype:
    return next(d for d in Datatype if configuration.data_type(d) == declaration.data_type)


def _twice(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return data + data


def make(
    extra: str = "dynamic_batching { }",
    config: str = CONFIG,
    model: Callable[[Any, Execution], Any] = DoublingModelBackend,
    **execution: Any,
) -> tuple[Infer, Any, Statistics]:
    """A batcher, the model behind it and the statistics."""
    completed = configuration.complete(configuration.parse(config + extra), "m")
    how = Execution(**{"batches": False, "parameters": False, **execution})
    made, statistics = model(completed, how), Statistics()
    signature = configuration.signature(completed)
    return Schedulers(made, statistics).batched(signature), made, statistics


def request(
    *rows: float, length: int = 1, name: str = "x", outputs: tuple[str, ...] = (), **parameters: Any
) -> InferRequest:
    """One row for each value, ``length`` times that value."""
    data = np.repeat(np.array(rows, np.float32)[:, None], length, axis=1)
    given: Mapping[str, Parameter] = parameters
    return InferRequest("m", [Tensor(name, Datatype.FP32, data)], outputs, parameters=given)


def tensor(name: str, datatype: Datatype, rows: Any) -> Tensor:
    if datatype is not Datatype.BYTES:
        return Tensor(name, datatype, np.array(rows, NUMPY_DTYPES[datatype]))
    data = np.empty((len(rows), 1), object)
    data[:, 0] = rows
    return Tensor(name, datatype, data)


def ask(
    infer: Infer, request: InferRequest, deadline: Deadline = NO_DEADLINE
) -> asyncio.Task[InferResponse]:
    async def run(answer: Awaitable[InferResponse]) -> InferResponse:
        return await answer

    return asyncio.create_task(run(infer(request, deadline)))


async def arrived() -> None:
    """Every task that was made has begun."""
    for _ in range(3):
        await asyncio.sleep(0)


async def all_of(*tasks: asyncio.Task[InferResponse]) -> list[Any]:
    """Every answer or error; none may hang."""
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_SECONDS)


def values(response: InferResponse, index: int = 0) -> list[Any]:
    found: list[Any] = response.outputs[index].data.tolist()
    return found


async def gathered(
    infer: Infer, model: Any, *requests: InferRequest, first: InferRequest | None = None
) -> list[Any]:
    """The answers to ``requests``, which gather while another runs; that one is forgotten."""
    model.hold()
    before = len(model.batches)
    running = ask(infer, first or request(100))
    await model.begun(before + 1)
    tasks = [ask(infer, each) for each in requests]
    await arrived()
    await model.go_on()
    answers = await all_of(running, *tasks)
    del model.batches[before]
    return answers[1:]
