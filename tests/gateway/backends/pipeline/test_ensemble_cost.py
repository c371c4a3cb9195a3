"""The check of an ensemble takes time in proportion to its steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from modelport.gateway.backends.pipeline import ensemble_check
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.wire.proto import model_config_pb2 as pb
from tests import processor

STEPS = 3000


def chain(order: Callable[[list[int]], list[int]], ends: bool = True) -> ModelConfig:
    """Each step takes what another makes, in this order."""
    config = pb.ModelConfig(name="chain", max_batch_size=1)
    config.input.add(name="t0", data_type=pb.TYPE_FP32, dims=[1])
    config.output.add(name=f"t{STEPS}" if ends else "other", data_type=pb.TYPE_FP32, dims=[1])
    for number in order(list(range(STEPS))):
        step = config.ensemble_scheduling.step.add(model_name="m", model_version=-1)
        step.input_map["x"], step.output_map["y"] = f"t{number}", f"t{number + 1}"
    return config


def model(name: str, version: int) -> ModelConfig:
    config = pb.ModelConfig(name="m", max_batch_size=1)
    config.input.add(name="x", data_type=pb.TYPE_FP32, dims=[1])
    config.output.add(name="y", data_type=pb.TYPE_FP32, dims=[1])
    return config


@pytest.mark.parametrize("order", [list, lambda steps: steps[::-1]], ids=["forwards", "backwards"])
def test_a_long_chain_is_checked_in_linear_time(order: Callable[[list[int]], list[int]]) -> None:
    """Backwards, 3,000 steps took minutes."""
    config = chain(order)
    started = time.process_time()
    assert len(ensemble_check.check("chain", config, model)) == STEPS
    assert processor.seconds_since(started) < 2.0


def test_a_chain_that_does_not_reach_the_output_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"output 'other' .* is not written"):
        ensemble_check.check("chain", chain(list, ends=False), model)
