"""Triton's identity backend: pairs of tensors, delays, optional inputs, instances."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from modelport.gateway.backends import identity
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded.embedded_backend import EmbeddedBackend
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import config
from modelport.gateway.types import NO_DEADLINE, Datatype, InferRequest, Tensor
from tests import models

PAIR = ["INPUT0 FP32 1"], ["OUTPUT0 FP32 1"]


def loaded(
    inputs: list[str], outputs: list[str], key: str = "execute_delay_ms", value: str = "0"
) -> EmbeddedBackend:
    parameter = f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
    text = models.config("m", inputs, outputs, 8, "identity", parameter)
    completed = config.complete(config.parse(text), "m")
    return identity.load(Artifact("m", 1, Path(), completed, 1))


def tensor(name: str, *values: float) -> Tensor:
    return Tensor(name, Datatype.FP32, np.array(values, np.float32).reshape(1, -1))


async def test_outputs_are_the_inputs_of_their_number_and_zeros_without_one() -> None:
    swapped = ["OUTPUT2 BYTES 2", "OUTPUT1 FP32 2", "OUTPUT0 FP32 2"]
    inputs = ["INPUT0 FP32 2", "INPUT1 FP32 2 optional: true", "INPUT2 BYTES 2 optional: true"]
    backend = loaded(inputs, swapped)
    answer = await backend(InferRequest("m", [tensor("INPUT0", 1, 2)]), NO_DEADLINE)
    assert [t.data.tolist() for t in answer.outputs] == [[[b"", b""]], [[0, 0]], [[1, 2]]]
    backend.unload()


async def test_each_execution_takes_its_delay_on_one_of_the_instances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    backend = loaded(*PAIR, value="30")
    monkeypatch.setattr(time, "sleep", slept.append)
    asked = (InferRequest("m", [tensor("INPUT0", i)]) for i in range(3))
    answers = await asyncio.gather(*(backend(request, NO_DEADLINE) for request in asked))
    assert [each.outputs[0].data.item() for each in answers] == [0, 1, 2]
    assert slept == [0.03] * 3
    backend.unload()


def test_a_load_takes_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    loaded(*PAIR, "creation_delay_sec", "3").unload()
    assert slept == [3]


@pytest.mark.parametrize(
    ("inputs", "outputs", "key", "value", "message"),
    [
        (*PAIR, "execute_delay_ms", "-1", "parameter 'execute_delay_ms' must be a whole"),
        (*PAIR, "execute_delay_ms", "soon", "parameter 'execute_delay_ms' must be a whole"),
        (*PAIR, "creation_delay_sec", "601", "parameter 'creation_delay_sec' is at most 600"),
        (*PAIR, "execute_delay_ms", "600001", "parameter 'execute_delay_ms' is at most 600000"),
        (["INPUT0 FP32 1"], ["OUTPUT0 INT32 1"], "a", "", "output 'OUTPUT0'.* of INT32"),
        (["INPUT0 FP32 1"], ["OUTPUT1 FP32 1"], "a", "", "output 'OUTPUT1'.*'INPUT1'"),
        (["INPUT0 FP32 1"], ["y FP32 1"], "a", "", "output 'y'.*INPUT<i>"),
        (["INPUT0 FP32 1", "x FP32 1"], PAIR[1], "a", "", "input 'x'.* has no output"),
    ],
)
def test_what_it_cannot_serve_is_refused(
    inputs: list[str], outputs: list[str], key: str, value: str, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        loaded(inputs, outputs, key, value)
