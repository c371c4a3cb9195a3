"""The fake backend's delays, and integers of every kind as JSON."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from modelport.gateway.backends import fake
from modelport.gateway.backends.base import Artifact
from modelport.gateway.repository import config
from modelport.gateway.types import NO_DEADLINE, Datatype, InferRequest, Tensor
from modelport.gateway.wire import json_text, raw_tensors
from tests import models


def loaded(value: str) -> fake.FakeBackend:
    delay = f'parameters {{ key: "delay_seconds" value {{ string_value: "{value}" }} }}'
    text = models.config("m", ["x FP32 1"], ["y FP32 1"], 0, "fake", delay)
    completed = config.complete(config.parse(text), "m")
    return fake.load(Artifact("m", 1, Path(), completed, 1))


async def test_the_delay_of_a_response_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    request = InferRequest("m", [Tensor("x", Datatype.FP32, np.ones(1, np.float32))])
    await loaded("0.03")(request, NO_DEADLINE)
    assert slept == [0.03]
    assert not loaded("0.03").execution.inline(request)
    assert loaded("0").execution.inline(request)


@pytest.mark.parametrize("kind", "bhilqBHILQpP?fd")
def test_a_scalar_of_every_type_that_numpy_has_is_json(kind: str) -> None:
    """ONNX Runtime's INT64 outputs are ``longlong``, which is not ``int64`` to everyone."""
    text = json_text.dumps({"value": json_text.numbers(np.array(1, dtype=kind))})
    assert json.loads(text) == {"value": 1}


async def test_an_output_that_no_input_fits_is_of_zeros_or_of_empty_strings() -> None:
    text = models.config("m", ["x FP32 2"], ["y BYTES 2", "z INT32 2"], 0, "fake")
    completed = config.complete(config.parse(text), "m")
    backend = fake.load(Artifact("m", 1, Path(), completed, 1))
    request = InferRequest("m", [Tensor("x", Datatype.FP32, np.ones(2, np.float32))])
    y, z = (await backend(request, NO_DEADLINE)).outputs
    assert (y.data.tolist(), z.data.tolist()) == ([b"", b""], [0, 0])
    assert bytes(raw_tensors.encode(y)) == bytes(8)


async def test_a_decoupled_stream_without_a_delay_lets_others_run_after_every_response() -> None:
    request = InferRequest("m", [Tensor("x", Datatype.FP32, np.ones(1, np.float32))])
    request.parameters = {"responses": 100}
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    try:
        between = [turns async for _ in loaded("0").stream(request, NO_DEADLINE)]
    finally:
        task.cancel()
    assert len(between) == 100
    assert len(set(between)) == 100
