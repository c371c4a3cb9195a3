"""The rate limiter: no execution without its resources, in turns by priority, however it begins."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from modelport.gateway.backends.base import Execution
from modelport.gateway.cli.serve import settings_of
from modelport.gateway.errors import InvalidArgument, ModelportError, QueueFull, TimedOut
from modelport.gateway.inference import pipeline, rate_limiter
from modelport.gateway.inference.batching import Schedulers
from modelport.gateway.inference.rate_limiter import ExplicitResources, LimitedModel, RateLimiter
from modelport.gateway.inference.signatures import NamedSignatures
from modelport.gateway.repository import config
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import (
    NO_DEADLINE,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    finished,
)
from tests.server import serving

TENSORS = (
    'input { name: "x" data_type: TYPE_FP32 dims: 1 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
)


def group(*resources: str, count: int = 1, priority: int = 0) -> str:
    """Resources are ``NAME:COUNT``, or ``NAME:COUNT:global``."""
    listed = ""
    for resource in resources:
        name, number, *everywhere = resource.split(":")
        shared = "global: true" if everywhere else ""
        listed += f'resources {{ name: "{name}" count: {number} {shared} }} '
    return f"instance_group {{ count: {count} rate_limiter {{ {listed} priority: {priority} }} }} "


def parsed(text: str, batch: int = 4) -> ModelConfig:
    return config.complete(config.parse(f'name: "m" max_batch_size: {batch} {TENSORS} {text}'), "m")


def registered(limiter: RateLimiter, *groups: str) -> LimitedModel:
    model = limiter.limit(parsed("".join(groups)))
    assert model is not None
    return model


def test_a_model_without_a_rate_limiter_is_not_limited() -> None:
    assert RateLimiter({}).limit(parsed("instance_group { count: 2 }")) is None


# -- resources ------------------------------------------------------------------------------------


async def contend(
    limiter: RateLimiter, models: Sequence[LimitedModel], capacity: Counter[Any], seed: int
) -> None:
    """Execute at random, with callers that give up; require that no resource is exceeded."""
    chance, used, ended = random.Random(seed), Counter[Any](), 0

    async def caller(model: LimitedModel) -> None:
        nonlocal ended
        instance = await limiter.allocate(model, NO_DEADLINE)
        used.update(instance.needs)
        try:
            assert all(used[each] <= capacity[each] for each in instance.needs)
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            ended += 1
        finally:
            used.subtract(instance.needs)
            limiter.release(model, instance)

    callers = [asyncio.create_task(caller(chance.choice(models))) for _ in range(60)]
    leaving = chance.sample(callers, 20)
    for each in leaving:
        await asyncio.sleep(0)
        each.cancel()
    async with asyncio.timeout(10):
        found = await asyncio.gather(*callers, return_exceptions=True)
    errors = [each for each in found if isinstance(each, Exception)]
    assert not errors, errors[0]
    assert ended >= 40
    assert sum(len(model.free) for model in models) == sum(len(m.instances) for m in models)


def mixture(explicit: ExplicitResources) -> tuple[RateLimiter, list[LimitedModel]]:
    limiter = RateLimiter(explicit)
    return limiter, [
        registered(limiter, group("a:4", count=2), group("b:1", "c:2:global", priority=2)),
        registered(limiter, group("a:2", "c:1:global", count=3, priority=3)),
        registered(limiter, group("a:1", count=2), group()),
    ]


@pytest.mark.parametrize(
    ("explicit", "capacity"),
    [
        ({}, {("a", 0): 4, ("b", 0): 1, ("c", None): 2}),
        (
            {("a", None): 5, ("a", 1): 9, ("b", 0): 2, ("b", 1): 9, ("c", 7): 3, ("d", 0): 1},
            {("a", 0): 5, ("b", 0): 2, ("c", None): 3},
        ),
    ],
)
async def test_no_resource_is_exceeded_and_everyone_has_a_turn(
    explicit: ExplicitResources, capacity: Any
) -> None:
    for seed in range(10):
        limiter, models = mixture(explicit)
        await contend(limiter, models, Counter(capacity), seed)


async def test_a_limiter_that_always_has_resources_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RateLimiter, "_has", lambda self, needs: True)
    limiter, models = mixture({})
    with pytest.raises(AssertionError):
        await contend(limiter, models, Counter({("a", 0): 4, ("b", 0): 1, ("c", None): 2}), 0)


async def test_an_instance_of_priority_two_has_half_the_turns() -> None:
    limiter = RateLimiter({})
    models = {each: registered(limiter, group("a:1", priority=each)) for each in (1, 2, 4)}
    turns: list[int] = []

    async def caller(priority: int) -> None:
        while len(turns) < 70:
            instance = await limiter.allocate(models[priority], NO_DEADLINE)
            turns.append(priority)
            await asyncio.sleep(0)
            limiter.release(models[priority], instance)

    await asyncio.gather(*(caller(priority) for priority in models for _ in range(3)))
    counts = Counter(turns[:70])
    assert [round(counts[each] / 10) for each in (1, 2, 4)] == [4, 2, 1]
    # A model that is loaded later does not catch up first.
    turns.clear()
    models[8] = registered(limiter, group("a:1", priority=8))
    await asyncio.gather(*(caller(priority) for priority in (1, 8) for _ in range(3)))
    assert 5 <= Counter(turns[:70])[8] <= 10


async def test_a_resource_of_a_model_that_has_gone_counts_no_more() -> None:
    limiter = RateLimiter({})
    models = [registered(limiter, group("a:8")), *(registered(limiter, group("a:4")) for _ in "bc")]
    second, third = models[1:]
    del models
    first = await limiter.allocate(second, NO_DEADLINE)
    with pytest.raises(TimedOut):
        await limiter.allocate(third, Deadline.after(0.01))
    limiter.release(second, first)
    limiter.release(third, await limiter.allocate(third, NO_DEADLINE))


async def test_too_many_waiting_executions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limiter, "DEFAULT_MAX_QUEUE_SIZE", 2)
    limiter = RateLimiter({})
    model = registered(limiter, group("a:1"))
    instance = await limiter.allocate(model, NO_DEADLINE)
    for _ in range(5):  # those that have gone do not count
        with pytest.raises(TimedOut):
            await limiter.allocate(model, Deadline.after(0.001))
    waiting = [asyncio.create_task(limiter.allocate(model, NO_DEADLINE)) for _ in range(3)]
    with pytest.raises(QueueFull):
        await waiting[2]
    for each in waiting[:2]:
        limiter.release(model, instance)
        instance = await each


@pytest.mark.parametrize(
    ("explicit", "before", "refused", "reason"),
    [
        ({("r", None): 1}, (), group("r:4"), '"r" is limited to 1 which will prevent scheduling of '
         "one or more model instances, the minimum required count is 4"),
        ({("r", 10): 10}, (), group("r:4"), '"r" is limited to 0 which will prevent'),
        ({("s", None): 10}, (), group("r:4"), '"r" is limited to 0 which will prevent'),
        ({}, (group("r:2:global"),), group("r:2"), 'Resource "r" is present as both global and'),
    ],
)  # fmt: skip
async def test_an_instance_that_could_never_execute_is_refused(
    explicit: ExplicitResources, before: tuple[str, ...], refused: str, reason: str
) -> None:
    limiter = RateLimiter(explicit)
    held = [registered(limiter, each) for each in before]
    with pytest.raises(InvalidArgument, match=reason):
        registered(limiter, refused)
    for model in held:  # unharmed
        limiter.release(model, await limiter.allocate(model, NO_DEADLINE))


# -- every way to begin an execution --------------------------------------------------------------


class Counted:
    """A backend of every capability; it counts the executions that are present."""

    problem = ""
    signature_defs = b""

    def __init__(self, made: ModelConfig, interruptible: bool) -> None:
        self.config = made
        self.execution = Execution(
            batches=False, interruptible=interruptible, inline=lambda _: True, ahead=2
        )
        spec = config.signature(made)
        self.signatures = {"named": ModelSignature(spec.inputs, spec.outputs, spec.max_batch_size)}
        self.present = self.most = 0

    async def _execute(self) -> None:
        self.present += 1
        self.most = max(self.most, self.present)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
        finally:
            self.present -= 1

    def __call__(self, request: InferRequest, deadline: Deadline) -> Any:
        return self._answer(request)

    async def _answer(self, request: InferRequest) -> InferResponse:
        await self._execute()
        return InferResponse("m", 1, [Tensor("y", Datatype.FP32, request.inputs[0].data)])

    def unload(self) -> None: ...


class CountedTogether(Counted):
    async def infer_together(
        self, requests: Sequence[InferRequest], *_: Any
    ) -> list[InferResponse | ModelportError]:
        await self._execute()
        return [
            InferResponse("m", 1, [Tensor("y", Datatype.FP32, each.inputs[0].data)])
            for each in requests
        ]


class CountedStreams(CountedTogether):
    """Opens a stream, and executes it in its turn, as Python models do."""

    def open(self, request: InferRequest, deadline: Deadline) -> asyncio.Queue[InferResponse]:
        return asyncio.Queue()

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        raise AssertionError("it is not limited")
        yield

    async def responses(
        self, opened: asyncio.Queue[InferResponse]
    ) -> AsyncGenerator[InferResponse, None]:
        yield await opened.get()

    async def execute_together(self, opened: Sequence[asyncio.Queue[InferResponse]]) -> None:
        await self._execute()
        for each in opened:
            each.put_nowait(InferResponse("m", 1, []))


BATCHED = "dynamic_batching { preferred_batch_size: 2 }"
SEQUENCES = (
    "sequence_batching {{ {} control_input {{ name: 'START' control {{ "
    "kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }} }} }}"
)
WAYS = {
    "alone": (Counted, "", {}),
    "in a batch": (Counted, BATCHED, {}),
    "side by side": (CountedTogether, BATCHED, {}),
    "side by side, alone": (CountedTogether, "", {}),
    "a signature": (Counted, "", {"signature": "named"}),
    "a signature, in a batch": (Counted, BATCHED, {"signature": "named"}),
    "a signature, of another shape": (Counted, BATCHED, {"signature": "named", "rows": 5}),
    "a stream": (CountedStreams, "model_transaction_policy { decoupled: true }", {}),
    "a stream, in a batch": (
        CountedStreams,
        "model_transaction_policy { decoupled: true } " + BATCHED,
        {},
    ),
    "a sequence": (Counted, SEQUENCES.format("direct { }"), {"sequence": True}),
    "oldest sequences": (
        Counted,
        SEQUENCES.format("oldest { max_candidate_sequences: 4 }"),
        {"sequence": True},
    ),
}


async def most_present(way: str, limiter: RateLimiter | None, interruptible: bool) -> int:
    """The executions that were present together while requests came, and some callers left."""
    kind, text, asked = WAYS[way]
    made = parsed(text + group("a:2", count=3))
    backend, shared = kind(made, interruptible), pipeline.SharedState(rate_limiter=limiter)
    schedulers = Schedulers(backend, Statistics(), shared.limit(made))
    named = NamedSignatures("m", schedulers)
    built = pipeline.build("m", 1, named, shared, Path, None, schedulers)

    async def ask(index: int) -> None:
        data = np.zeros((asked.get("rows", 1), 1), np.float32)
        request = InferRequest("m", [Tensor("x", Datatype.FP32, data)])
        request.signature = asked.get("signature", "")
        if asked.get("sequence"):
            request.parameters = {"sequence_id": index + 1, "sequence_start": True}
        if made.model_transaction_policy.decoupled:
            async with aclosing(built.stream(request, NO_DEADLINE)) as responses:
                assert len([each async for each in responses]) == 1
        else:
            await finished(built.infer(request, NO_DEADLINE))

    callers = [asyncio.create_task(ask(index)) for index in range(12)]
    for each in callers[::4]:
        await asyncio.sleep(0)
        each.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*callers, return_exceptions=True)
        while backend.present:
            await asyncio.sleep(0)
    failed = [each.exception() for each in callers if not each.cancelled()]
    assert not any(failed), failed
    return backend.most


@pytest.mark.parametrize("interruptible", [False, True])
@pytest.mark.parametrize("way", WAYS)
async def test_every_execution_is_limited(way: str, interruptible: bool) -> None:
    assert await most_present(way, RateLimiter({("a", None): 4}), interruptible) == 2


@pytest.mark.parametrize("way", [way for way in WAYS if way != "a stream"])
async def test_executions_are_not_limited_without_a_limiter(way: str) -> None:
    assert await most_present(way, None, interruptible=False) > 2


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rate-limit", "on"], "'on' is not one of 'off', 'execution_count'"),
        (["--rate-limit-resource", "r:1"], "needs --rate-limit=execution_count"),
        (["--rate-limit=execution_count", "--workers=2"], "use it with --workers 1"),
        *(
            (
                ["--rate-limit=execution_count", "--rate-limit-resource", wrong],
                f"'{wrong}' is not NAME:COUNT or NAME:COUNT:DEVICE",
            )
            for wrong in (
                "",
                "r",
                "r:",
                ":1",
                "r:-1",
                "r:1:",
                "r:1:2:3",
                "r:1:GPU",
                "r:" + "9" * 99,
            )
        ),
    ],
)
def test_a_wrong_option_is_refused(tmp_path: Path, arguments: list[str], reason: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        settings_of([str(tmp_path), *arguments], environment=False)
    assert reason in raised.value.format_message()


def test_the_largest_count_of_a_resource_holds(tmp_path: Path) -> None:
    flags = (
        part for each in ("r:1", "r:3", "r:2", "r:0:1") for part in ("--rate-limit-resource", each)
    )
    settings = settings_of([str(tmp_path), "--rate-limit=execution_count", *flags], False)
    assert settings.rate_limits == {("r", None): 3, ("r", 1): 0}
    assert settings_of([str(tmp_path)], environment=False).rate_limits is None


def test_a_gateway_limits_its_models_and_refuses_those_that_could_never_run(
    tmp_path: Path,
) -> None:
    for name, needed in (("small", 1), ("whole", 4), ("large", 5)):
        folder = tmp_path / name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(
            f'name: "{name}" backend: "identity" max_batch_size: 4 {group(f"memory:{needed}")}'
            'input { name: "INPUT0" data_type: TYPE_FP32 dims: 1 } '
            'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 1 }'
        )
    limits = ("--rate-limit", "execution_count", "--rate-limit-resource", "memory:4")
    with serving(tmp_path, *limits, "--strict-readiness", "false") as gateway:
        values = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [3]}

        def ask(path: str) -> Any:
            asked = {"inputs": [values]} if path.endswith("infer") else {}
            url = f"http://{gateway.http}/v2/{path}"
            with urllib.request.urlopen(url, json.dumps(asked).encode(), timeout=30) as answer:
                return json.load(answer)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, ["models/small/infer", "models/whole/infer"] * 8))
        assert [each["outputs"][0]["data"] for each in answers] == [[3.0]] * 16
        index = ask("repository/index")
    (reason,) = [each["reason"] for each in index if each["name"] == "large"]
    assert 'Resource count for "memory" is limited to 4 which' in reason
