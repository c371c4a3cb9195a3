"""Ensembles over models that batch and models that do not, decoupled steps, and parameters."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise, product

import numpy as np
import pytest

from modelport.gateway.backends.pipeline import graph_backend
from modelport.gateway.backends.pipeline.graph import RequestState
from modelport.gateway.backends.pipeline.graph_backend import GraphBackend
from modelport.gateway.errors import Internal, InvalidArgument
from modelport.gateway.repository import config
from modelport.gateway.types import (
    NO_DEADLINE,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
)
from tests.gateway.backends.pipeline.test_ensemble import (
    AB,
    CHAIN,
    double,
    ensemble,
    request,
    step,
    text,
    twice,
)


def flat(values: list[float]) -> InferRequest:
    return InferRequest("e", [Tensor("in", Datatype.FP32, np.array(values, np.float32))])


async def test_an_ensemble_that_does_not_batch_gives_those_that_do_a_batch_of_one() -> None:
    shapes = []

    async def seen(request: InferRequest, deadline: Deadline) -> InferResponse:
        shapes.append(request.inputs[0].data.shape)
        return await twice(request, deadline)

    known = {"a": double("a", batch=8), "b": double("b", batch=0)}
    response = await ensemble(text(*CHAIN, batch=0), known, seen)(flat([1, 2, 3, 4]), NO_DEADLINE)
    assert shapes == [(1, 4), (4,)]
    assert response.outputs[0].data.tolist() == [4.0, 8.0, 12.0, 16.0]


async def test_an_ensemble_that_batches_gives_those_that_do_not_its_batch_of_one() -> None:
    shapes = []

    async def seen(request: InferRequest, deadline: Deadline) -> InferResponse:
        shapes.append(request.inputs[0].data.shape)
        return await twice(request, deadline)

    known = {"a": double("a", batch=0), "b": double("b", batch=8)}
    one = InferRequest("e", [Tensor("in", Datatype.FP32, np.ones((1, 4), np.float32))])
    response = await ensemble(text(*CHAIN), known, seen)(one, NO_DEADLINE)
    assert shapes == [(4,), (1, 4)]
    assert response.outputs[0].data.shape == (1, 4)
    await ensemble(text(*CHAIN), known, seen)(request(), NO_DEADLINE)
    assert shapes[2] == (2, 4)  # a batch of two stays one, and the model's own checks refuse it


async def test_a_requests_parameters_reach_every_step() -> None:
    got = []

    async def noted(request: InferRequest, deadline: Deadline) -> InferResponse:
        got.append(dict(request.parameters))
        return await twice(request, deadline)

    asked = request()
    asked.parameters = {"mine": 1, "priority": 2}
    await ensemble(text(*CHAIN), AB, noted)(asked, NO_DEADLINE)
    assert got == [{"mine": 1, "priority": 2}] * 2


# -- decoupled steps ------------------------------------------------------------------------------


def decoupled(name: str, batch: int = 0) -> config.ModelConfig:
    made = double(name, batch)
    made.model_transaction_policy.decoupled = True
    return made


async def responses(backend: GraphBackend, first: float) -> list[list[float]]:
    asked = flat([first, 0, 0, 0])
    return [r.outputs[0].data.tolist()[:2] async for r in backend.stream(asked, NO_DEADLINE)]


async def test_what_follows_a_decoupled_step_runs_for_each_of_its_responses() -> None:
    backend = ensemble(text(*CHAIN, batch=0), {"a": decoupled("a"), "b": double("b", 0)})
    assert backend.config.model_transaction_policy.decoupled
    assert await responses(backend, 3) == [[6.0, 0.0], [8.0, 2.0], [10.0, 4.0]]
    assert await responses(backend, 0) == []


async def test_decoupled_steps_may_follow_one_another() -> None:
    backend = ensemble(text(*CHAIN, batch=0), {"a": decoupled("a"), "b": decoupled("b")})
    assert await responses(backend, 1) == [[1.0, 0.0]]
    assert len(await responses(backend, 2)) == 2 + 3


# -- the final response ---------------------------------------------------------------------------

#: ``P`` responds once; ``D`` is decoupled and sends its end by itself, ``F`` with a response.
CHAINS = ["".join(kinds) for n in (1, 2, 3) for kinds in product("PDF", repeat=n)]


async def finals(kinds: str, count: int) -> list[bool]:
    """Whether each response of a chain is final; each decoupled step responds ``count`` times."""

    async def stream(
        asked: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        (x,) = asked.inputs
        for index in range(count):
            last = "F" in asked.model_name and index == count - 1
            yield InferResponse("", 1, [Tensor("y", x.datatype, x.data)], final=last)

    known, steps = {}, []
    for index, kind in enumerate(kinds):
        name = f"{kind}{index}"
        known[name] = double(name, 0) if kind == "P" else decoupled(name)
        taken, made = index or "in", "out" if index == len(kinds) - 1 else index + 1
        steps.append(step(name, {"x": str(taken)}, {"y": str(made)}))
    backend = ensemble(text(*steps, batch=0), known, stream=stream)
    return [each.final async for each in backend.stream(flat([1, 0, 0, 0]), NO_DEADLINE)]


@pytest.mark.parametrize("kinds", CHAINS)
async def test_the_last_response_is_final_if_the_end_is_known_by_then(kinds: str) -> None:
    """Only an end that a lone decoupled step at the end sends by itself comes later."""
    for count in (0, 1, 3):
        made = count ** sum(kind != "P" for kind in kinds)
        expected = [False] * (made - 1) + [kinds.strip("P")[1:] != "" or kinds[-1] != "D"]
        assert await finals(kinds, count) == expected[:made]


async def one_by_one(
    sources: AsyncGenerator[RequestState, None],
    branch: Callable[[RequestState], AsyncGenerator[RequestState, None]],
    most: int,
) -> AsyncGenerator[RequestState, None]:
    """The known-bad variant of ``overlapped``."""
    async for source in sources:
        async for result in branch(source):
            yield result


async def test_an_end_is_unknown_without_looking_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_backend, "overlapped", one_by_one)
    assert await finals("DP", 2) == [False, False]


# -- overlapping responses ------------------------------------------------------------------------


class Crossing:
    """Models ``b`` and ``c`` that answer the requests present in reverse, and count them."""

    def __init__(self) -> None:
        self.most, self._present = Counter[str](), Counter[str]()

    async def infer(self, asked: InferRequest, deadline: Deadline) -> InferResponse:
        name = asked.model_name
        self._present[name] += 1
        self.most[name] = max(self.most[name], self._present[name])
        for _ in range(int(20 - asked.inputs[0].data.flat[0] % 20)):  # the last ones are quick
            await asyncio.sleep(0)
        self._present[name] -= 1
        return InferResponse(name, 1, [Tensor("y", Datatype.FP32, asked.inputs[0].data)])


def crossing(models: Crossing, limit: int = 0) -> GraphBackend:
    known = {"a": decoupled("a"), "b": double("b", 0), "c": double("c", 0)}
    steps = (*CHAIN[:1], step("b", {"x": "middle"}, {"y": "late"}))
    described = text(*steps, step("c", {"x": "late"}, {"y": "out"}), batch=0)
    limited = f"ensemble_scheduling {{ max_inflight_requests: {limit}"
    return ensemble(described.replace("ensemble_scheduling {", limited), known, models.infer)


@pytest.mark.parametrize("limit", [0, 1, 2, 4])
async def test_responses_overlap_up_to_the_limit_and_keep_their_order(limit: int) -> None:
    models = Crossing()
    backend = crossing(models, limit)
    found = await asyncio.gather(*(responses(backend, 9) for _ in range(3)))
    assert found == [[[9.0 + index, index] for index in range(9)]] * 3
    if limit:
        assert max(models.most.values()) == limit
    else:
        assert min(models.most.values()) > 9  # of several requests


async def test_responses_do_not_overlap_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_backend, "overlapped", one_by_one)
    models = Crossing()
    await responses(crossing(models), 9)
    assert models.most == {"b": 1, "c": 1}


@pytest.mark.parametrize(("producers", "most"), [(1, 70), (2, 120)])
async def test_producers_wait_for_what_follows(producers: int, most: int) -> None:
    """They are endless, and their consumer answers nothing."""
    count = 0

    async def endless(
        asked: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        nonlocal count
        while count < 1000:
            count += 1
            await asyncio.sleep(0)
            yield InferResponse("", 1, [Tensor("y", Datatype.FP32, asked.inputs[0].data)])

    async def never(asked: InferRequest, deadline: Deadline) -> InferResponse:
        await asyncio.Event().wait()
        raise AssertionError

    known = {"a": decoupled("a"), "b": double("b", 0)}
    tensors = ["in", *map(str, range(producers)), "out"]
    models = [*"a" * producers, "b"]
    steps = [
        step(model, {"x": taken}, {"y": made})
        for model, (taken, made) in zip(models, pairwise(tensors), strict=True)
    ]
    backend = ensemble(text(*steps, batch=0), known, never, endless)
    waiting = asyncio.create_task(anext(backend.stream(flat([1, 0, 0, 0]), NO_DEADLINE)))
    for _ in range(5000):
        await asyncio.sleep(0)
    assert 2 < count < most
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_failure_of_either_step_ends_the_stream_and_the_other_step() -> None:
    ended = []

    async def stream(
        asked: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        (x,) = asked.inputs
        try:
            yield InferResponse("", 1, [Tensor("y", x.datatype, x.data)])
            if x.data.flat[0] < 0:
                raise Internal("the producer failed")
            await asyncio.Event().wait()
        finally:
            ended.append(x.data.flat[0])

    async def breaks(asked: InferRequest, deadline: Deadline) -> InferResponse:
        if asked.inputs[0].data.flat[0] > 0:
            await asyncio.sleep(0)
            raise Internal("the consumer failed")
        return await twice(asked, deadline)

    known = {"a": decoupled("a"), "b": double("b", 0)}
    backend = ensemble(text(*CHAIN, batch=0), known, breaks, stream)
    failing = backend.stream(flat([-1, 0, 0, 0]), NO_DEADLINE)
    assert not (await anext(failing)).final
    with pytest.raises(Internal, match="in ensemble 'e', the producer failed"):
        await anext(failing)
    with pytest.raises(Internal, match="in ensemble 'e', the consumer failed"):
        await anext(backend.stream(flat([1, 0, 0, 0]), NO_DEADLINE))
    going = backend.stream(flat([0, 0, 0, 0]), NO_DEADLINE)
    assert not (await anext(going)).final
    await going.aclose()
    assert ended == [-1, 1, 0]


async def test_decoupled_steps_beside_one_another_are_refused() -> None:
    join = config.complete(
        config.parse(
            'name: "join" backend: "fake" '
            'input { name: "l" data_type: TYPE_FP32 dims: 4 } '
            'input { name: "r" data_type: TYPE_FP32 dims: 4 } '
            'output { name: "y" data_type: TYPE_FP32 dims: 4 }'
        ),
        "join",
    )
    beside = (
        step("a", {"x": "in"}, {"y": "left"}),
        step("b", {"x": "in"}, {"y": "right"}),
        step("join", {"l": "left", "r": "right"}, {"y": "out"}),
    )
    known = {"a": decoupled("a"), "b": decoupled("b"), "join": join}
    with pytest.raises(InvalidArgument, match="depends on several decoupled models"):
        ensemble(text(*beside, batch=0), known)
    ensemble(text(*beside, batch=0), known | {"b": double("b", 0)})
