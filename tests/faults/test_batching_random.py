"""Random cancels, time-outs and poison in batches: nobody hangs, and nobody gets another's answer.

Every request carries its own nonce in each of its rows. ``MODELPORT_BATCHING_CASES`` says how many
requests there are; the rules of reliability ask for 10^5 in the long run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest

from modelport.gateway.backends.base import Execution
from modelport.gateway.backends.embedded.instances import Instances
from modelport.gateway.errors import Internal, ModelportError, QueueFull, TimedOut
from modelport.gateway.inference.batching.batcher import Batcher
from modelport.gateway.models.inference_service import within
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import (
    NO_DEADLINE,
    Datatype,
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)
from tests.gateway.inference.batching.batchers import make

CASES = int(os.environ.get("MODELPORT_BATCHING_CASES", "10000"))
#: Ordeals until a batch that was submitted ahead is recalled, which is a matter of chance.
MOST_ORDEALS = 20
IN_FLIGHT = 48
#: Far more than any request of an ordeal takes, whatever else the machine does.
HUNG_SECONDS = 60.0
TOLERANCE = 1e-6
CONFIG = """
name: "m"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
parameters { key: "axes.x" value { string_value: "n" } }
parameters { key: "axes.y" value { string_value: "n" } }
"""
PADDED = 'parameters { key: "padding.n" value { string_value: "0" } }'
POISON_AT = 0.5


def compute(data: Any) -> Any:
    """Every row's nonce, where the row has a value; a fraction is poison."""
    if (data % 1 == POISON_AT).any():
        raise Internal("poison")
    return np.sqrt(data)


class Sleepy:
    """Takes a random while, now and then none at all."""

    problem = ""

    def __init__(self, config: Any, execution: Execution) -> None:
        self.config, self.execution = config, execution
        self.random = Random(7)
        self.executions = 0
        self.largest = 0

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        data = request.inputs[0].data
        self.executions += 1
        self.largest = max(self.largest, len(data))
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)
        if self.random.random() < 0.5:
            await asyncio.sleep(self.random.random() * 0.002)
        return InferResponse("m", 1, [Tensor("y", Datatype.FP32, compute(data))])

    def unload(self) -> None: ...


class Threads(Sleepy):
    """The same in real threads, as embedded runtimes run; small requests on the event loop."""

    def __init__(self, config: Any, execution: Execution) -> None:
        self._instances = Instances(self._run, "ordeal", 2)
        self._instances.allow_inline(2)
        super().__init__(config, Execution(False, False, False, self._instances.inline))

    def _run(self, request: InferRequest) -> InferResponse:
        data = request.inputs[0].data
        self.largest = max(self.largest, len(data))
        return InferResponse("m", 1, [Tensor("y", Datatype.FP32, compute(data))])

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        self.executions += 1
        return await finished(self._instances(request, deadline))

    def unload(self) -> None:
        self._instances.close()


class Ahead(Threads):
    """Is told what comes next, and takes a while, so that requests go before it has begun."""

    def __init__(self, config: Any, execution: Execution) -> None:
        super().__init__(config, execution)
        self.execution = Execution(False, False, False, self._instances.inline, ahead=1)

    def _run(self, request: InferRequest) -> InferResponse:
        time.sleep(self.random.random() * 0.001)
        return super()._run(request)


@dataclass
class Findings:
    """Counts of outcomes of requests; ``faults`` are those that must not occur."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


async def ordeal(infer: Infer, cases: int, seed: int = 1, hung: float = HUNG_SECONDS) -> Findings:
    """Ask ``cases`` times, at most ``IN_FLIGHT`` at once, and look at every end."""
    random, findings = Random(seed), Findings()
    nonces = iter(range(1, cases + 1))
    over = asyncio.Event()

    async def client() -> None:
        for nonce in nonces:
            if over.is_set():
                return
            await one(nonce)

    async def one(nonce: int) -> None:
        poison = random.random() < 0.03
        length = random.randint(1, 4)
        rows = random.choice((1, 1, 1, 2, 3, 8))
        data = np.full((rows, length), nonce + POISON_AT * poison, np.float32)
        request = InferRequest(
            "m",
            [Tensor("x", Datatype.FP32, data)],
            parameters={"priority": random.randint(0, 3)},
        )
        seconds = random.random() * 0.004
        deadline = Deadline.after(seconds) if random.random() < 0.2 else NO_DEADLINE
        task = asyncio.create_task(asked(infer, request, deadline))
        cancels = random.random() < 0.25
        if cancels:
            for _ in range(random.randrange(6)):
                await asyncio.sleep(0)
            if random.random() < 0.5:
                await asyncio.sleep(random.random() * 0.003)
            task.cancel()
        done, _ = await asyncio.wait({task}, timeout=hung)
        if not done:
            findings.faults["hung"] += 1
            over.set()
            task.cancel()
            return
        how = end(task, np.sqrt(data))
        findings.ends[how] += 1
        allowed = {"answered": not poison, "poison": poison, "cancelled": cancels}
        allowed |= {"timed out": deadline is not NO_DEADLINE, "full": True}
        if not allowed.get(how, False):
            findings.faults[how] += 1

    await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
    return findings


async def asked(infer: Infer, request: InferRequest, deadline: Deadline) -> InferResponse:
    """Answer like the inference service."""
    return await within(finished(infer(request, deadline)), deadline)


def end(task: asyncio.Future[InferResponse], expected: Any) -> str:
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    if isinstance(error, TimedOut):
        return "timed out"
    if isinstance(error, QueueFull):
        return "full"
    if isinstance(error, ModelportError) and str(error) == "poison":
        return "poison"
    if error is not None:
        return f"unexpected: {error!r}"
    data = task.result().outputs[0].data
    same = data.shape == expected.shape and np.allclose(data, expected, rtol=TOLERANCE)
    return "answered" if same else "another's answer"


SETTINGS = {
    "plain": ("dynamic_batching { }", Sleepy),
    "threads": ("dynamic_batching { } instance_group { count: 2 }", Threads),
    "ahead": (
        "dynamic_batching { preferred_batch_size: [ 4, 8 ] } instance_group { count: 2 }",
        Ahead,
    ),
    "padded": (PADDED + "dynamic_batching { } instance_group { count: 2 }", Sleepy),
    "delayed": (
        PADDED + "dynamic_batching { preferred_batch_size: [ 4, 8 ] "
        "max_queue_delay_microseconds: 1000 default_queue_policy { max_queue_size: 40 } }",
        Sleepy,
    ),
    "levels": (
        "dynamic_batching { priority_levels: 3 default_priority_level: 2 default_queue_policy "
        "{ timeout_action: DELAY default_timeout_microseconds: 1000 } }",
        Sleepy,
    ),
    "ordered": (
        "dynamic_batching { preserve_ordering: true } instance_group { count: 3 }",
        Sleepy,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_no_request_hangs_or_gets_the_answer_of_another(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recalled, put_back = [], Batcher._put_back
    monkeypatch.setattr(Batcher, "_put_back", lambda *each: (recalled.append(1), put_back(*each)))
    extra, model_class = SETTINGS[name]
    infer, model, _ = make(extra, CONFIG, model_class)
    cases = -(-CASES // len(SETTINGS))
    for _ in range(MOST_ORDEALS):
        findings = await ordeal(infer, cases)
        assert findings.faults == {}
        assert sum(findings.ends.values()) == cases
        # The ordeal is one: everything that it is about has really happened.
        ends = [findings.ends[how] for how in ("answered", "cancelled", "timed out", "poison")]
        assert min(ends) > 0
        assert model.largest == 8
        if recalled or model_class is not Ahead:
            break
    assert bool(recalled) is (model_class is Ahead)
    batcher: Any = infer
    assert not any((batcher._queue, batcher._running, batcher._next, batcher._order))
    model.unload()


class AdaptiveBatcher:
    """The known-bad variant: MLServer's ``AdaptiveBatcher`` (``mlserver/batching/adaptive.py``).

    Its fault: a request that is cancelled takes its entry out of the table, and the loop that gives
    out a batch's answers ends there, and again when it gives out that error.
    """

    def __init__(self, infer: Infer, max_batch_size: int, max_batch_seconds: float) -> None:
        self._infer = infer
        self._max_batch_size, self._max_batch_seconds = max_batch_size, max_batch_seconds
        self._requests: asyncio.Queue[tuple[int, InferRequest]] = asyncio.Queue()
        self._replies: dict[int, asyncio.Future[InferResponse]] = {}
        self._numbers = iter(range(10**9))
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        number = next(self._numbers)
        self._replies[number] = asyncio.get_running_loop().create_future()
        await self._requests.put((number, request))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._batches())
        try:
            return await self._replies[number]
        finally:
            del self._replies[number]

    async def _batches(self) -> None:
        while not self._requests.empty():
            batch = [await self._requests.get()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._max_batch_seconds):
                    while len(batch) < self._max_batch_size:
                        batch.append(await self._requests.get())
            # There this ends in the callback of a task, whose error is only logged.
            with contextlib.suppress(KeyError, asyncio.InvalidStateError):
                await self._run(batch)

    async def _run(self, batch: list[tuple[int, InferRequest]]) -> None:
        try:
            answers = [
                (n, await finished(self._infer(request, NO_DEADLINE))) for n, request in batch
            ]
            for number, answer in answers:
                self._replies[number].set_result(answer)
        except Exception as error:
            for number, _ in batch:
                self._replies[number].set_exception(error)


@pytest.mark.thorough
async def test_the_ordeal_catches_the_batching_fault_of_mlserver() -> None:
    model = Sleepy(None, Execution())
    findings = await ordeal(AdaptiveBatcher(model, 8, 0.001), 2000, hung=2.0)
    assert findings.faults["hung"] > 0


class Shifted:
    """The known-bad variant that mixes up two answers of a batch now and then."""

    def __init__(self, infer: Infer, config: ModelConfig, execution: Execution) -> None:
        self._infer, self.config, self.execution = infer, config, execution

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        response = await finished(self._infer(request, deadline))
        if len(request.inputs[0].data) > 4:
            response.outputs[0].data = np.roll(response.outputs[0].data, 1, axis=0)
        return response


async def test_the_ordeal_catches_an_answer_that_is_anothers() -> None:
    def mixed(config: ModelConfig, execution: Execution) -> Any:
        return Shifted(Sleepy(config, execution), config, execution)

    infer, _, _ = make("dynamic_batching { }", CONFIG, mixed)
    findings = await ordeal(infer, 500)
    assert findings.faults["another's answer"] > 0
