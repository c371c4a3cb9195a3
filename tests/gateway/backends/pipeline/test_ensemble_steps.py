"""Ensembles over models that batch and models that do not, decoupled steps, and parameters."""

from __future__ import annotations

import numpy as np
import pytest

from modelport.gateway.backends.pipeline.graph_backend import GraphBackend
from modelport.gateway.errors import InvalidArgument
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
