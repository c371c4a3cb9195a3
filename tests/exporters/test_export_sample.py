"""``modelport sample``: requests and the answers they must get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from modelport.exporters.cli.sample import sample
from modelport.exporters.requests import sample_requests
from modelport.exporters.requests.random_inputs import draw
from modelport.gateway.errors import UsageError
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from modelport.loadtests.load import payloads
from modelport.loadtests.users.answer_checker import Checker

SIGNATURE = ModelSignature(
    inputs=(
        TensorSpec("tokens", Datatype.INT64, ("sequence",), minimum=0, maximum=9),
        TensorSpec("length", Datatype.INT64, (1,), minimum=1, maximum="sequence", reshape=()),
    ),
    outputs=(TensorSpec("score", Datatype.FP32, (1,), reshape=()),),
    max_batch_size=4,
    axes={"sequence": Axis("sequence", 1, 16)},
)


def score(inputs: Any) -> dict[str, Any]:
    assert inputs["length"].ndim == 1
    return {"score": inputs["tokens"].sum(axis=1).astype(np.float32) / 3}


def recorded(count: int = 20, batch: int = 2, seed: int = 0) -> dict[str, Any]:
    asked = list(sample_requests.requests(SIGNATURE, draw, count, batch, seed))
    return sample_requests.record(SIGNATURE, asked, score, 1e-6, 1e-5)


def test_what_is_written_is_what_load_tests_read(tmp_path: Path) -> None:
    sample_requests.write(tmp_path / "new" / "requests.json", recorded())
    found = payloads.read(tmp_path / "new" / "requests.json")
    assert found.expected is not None
    assert len(found.requests) == len(found.expected) == 20
    assert found.reshape == {"length": (), "score": ()}
    assert len({request["tokens"].shape for request in found.requests}) > 3
    for number, (request, expected) in enumerate(zip(found.requests, found.expected, strict=True)):
        assert request["length"].shape == expected["score"].shape == (2, 1)
        right = request["tokens"].sum(axis=1, keepdims=True).astype(np.float32) / 3
        checker = Checker(found, lambda body, _: {"score": np.frombuffer(body, "<f4")[:, None]})
        assert checker.problem(number, right.tobytes(), None) is None
        assert checker.problem(number, (right + np.float32(1e-3)).tobytes(), None) is not None


def test_the_same_seed_makes_the_same_file_and_another_another() -> None:
    assert json.dumps(recorded(seed=1)) == json.dumps(recorded(seed=1))
    assert json.dumps(recorded(seed=1)) != json.dumps(recorded(seed=2))


def test_a_batch_that_the_model_does_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match="--batch-size 5 is above the model's max_batch_size 4"):
        list(sample_requests.requests(SIGNATURE, draw, 1, 5, 0))


def test_a_checkpoint_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(sample, [str(tmp_path / "no.pt"), "-o", str(tmp_path / "r.json")])
    assert done.exit_code == 2
    assert "does not exist" in done.output
    assert not (tmp_path / "r.json").exists()
