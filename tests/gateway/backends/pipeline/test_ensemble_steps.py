"""Ensembles over models that batch and models that do not, decoupled steps, and parameters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import product

import numpy as np
import pytest

from modelport.gateway.backends.pipeline import graph_backend
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
    """Only an end that the last step sends by itself comes later, as in Triton."""
    for count in (0, 1, 3):
        made = count ** sum(kind != "P" for kind in kinds)
        expected = [False] * (made - 1) + [kinds[-1] != "D"]
        assert await finals(kinds, count) == expected[:made]


async def test_an_end_is_unknown_without_looking_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known-bad variant."""
    monkeypatch.setattr(graph_backend, "_ahead", lambda responses: responses)
    assert await finals("DP", 2) == [False, False]


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
