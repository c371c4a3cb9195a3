"""Ragged batches: each request gets the answer that it would get alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded import onnxruntime, ragged
from modelport.gateway.errors import Internal, InvalidArgument
from modelport.gateway.inference.batching import Schedulers
from modelport.gateway.repository import config
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import NO_DEADLINE, Datatype, InferRequest, InferResponse, Tensor
from modelport.gateway.types import finished as awaited

#: Sums of each request's elements, and twice its elements.
MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
sums (float[M] x, int32[N] ends, int32[K] bounds) => (float[N,1] total, float[M] twice) {
  nothing = Constant<value = float[1] {0.0}>()
  first = Constant<value = int64[1] {0}>()
  last = Constant<value = int64[1] {-1}>()
  axis = Constant<value = int32 {0}>()
  second = Constant<value = int64[1] {1}>()
  added = CumSum(x, axis)
  until = Concat<axis = 0>(nothing, added)
  begins = Slice(bounds, first, last)
  upper = Gather(until, ends)
  lower = Gather(until, begins)
  sum = Sub(upper, lower)
  total = Unsqueeze(sum, second)
  twice = Add(x, x)
}
"""
CONFIG = """
name: "m" platform: "onnxruntime_onnx" default_model_filename: "model.onnx" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
output { name: "total" data_type: TYPE_FP32 dims: 1 }
output { name: "twice" data_type: TYPE_FP32 dims: -1 }
batch_input {
  kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_INT32 source_input: "x"
}
batch_input {
  kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "bounds" data_type: TYPE_INT32
  source_input: "x"
}
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "twice" source_input: "x" }
dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 20000 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ragged")
    onnx.save(onnx.parser.parse_model(MODEL), path / "model.onnx")
    return path


def loaded(folder: Path, text: str = CONFIG) -> Any:
    made = config.complete(config.parse(text), "m")
    return onnxruntime.load(Artifact("m", 1, folder, made, 1))


def asked(values: Any, *outputs: str) -> InferRequest:
    data = np.array([values], np.float32)
    return InferRequest("m", [Tensor("x", Datatype.FP32, data)], outputs)


async def answers(folder: Path, sizes: Any) -> list[InferResponse]:
    backend = loaded(folder)
    statistics = Statistics()
    infer = Schedulers(backend, statistics).batched(config.signature(backend.config))
    requests = [asked(range(1, size + 1)) for size in sizes]
    replies = [awaited(infer(each, NO_DEADLINE)) for each in requests]
    found = await asyncio.gather(*replies)
    assert len(sizes) in statistics._batches, "they share a batch"
    backend.unload()
    return found


def right(found: list[InferResponse], sizes: Any) -> bool:
    return all(
        {tensor.name: tensor.data.tolist() for tensor in response.outputs}
        == {"total": [[size * (size + 1) / 2]], "twice": [[2.0 * i for i in range(1, size + 1)]]}
        for response, size in zip(found, sizes, strict=True)
    )


@pytest.mark.parametrize("seed", range(4))
async def test_requests_of_different_lengths_share_a_batch(folder: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 20, 8).tolist()
    assert right(await answers(folder, sizes), sizes)


async def test_wrong_places_in_the_batch_would_be_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ragged._batch_input
    monkeypatch.setattr(ragged, "_batch_input", lambda kind, shapes: given(kind, shapes[::-1]))
    sizes = [1, 2, 3, 4, 5, 6, 7, 8]
    assert not right(await answers(folder, sizes), sizes)


async def test_a_request_alone_gets_its_batch_inputs_and_only_what_it_asks_for(
    folder: Path,
) -> None:
    backend = loaded(folder)
    (only,) = (await awaited(backend(asked([1, 2, 3], "total"), NO_DEADLINE))).outputs
    assert (only.name, only.data.tolist()) == ("total", [[6.0]])
    backend.unload()


SHAPES = [(2, 1, 3), (1, 4, 1)]
BATCH_INPUTS = {
    "BATCH_ELEMENT_COUNT": [6, 4],
    "BATCH_ACCUMULATED_ELEMENT_COUNT": [6, 10],
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, 6, 10],
    "BATCH_ITEM_SHAPE": [[1, 3], [1, 3], [4, 1]],
    "BATCH_ITEM_SHAPE_FLATTEN": [1, 3, 1, 3, 4, 1],
}


@pytest.mark.parametrize("kind", ragged.pb.BatchInput.Kind.keys())
def test_a_batch_input_has_tritons_values(kind: str) -> None:
    made = ragged._batch_input(ragged.pb.BatchInput.Kind.Value(kind), SHAPES)
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        assert made.shape == (6,)
    else:
        assert made.tolist() == BATCH_INPUTS[kind]


REFUSED = {
    "expects 1 source input, got 0": ('source_input: "x"', ""),
    "unknown source input name 'z'": ('source_input: "x"', 'source_input: "z"'),
    "batch input data type must be TYPE_INT32 or TYPE_FP32": ("TYPE_INT32", "TYPE_INT64"),
    "unknown target output name 'z'": ('target_name: "twice"', 'target_name: "z"'),
    "raise 'max_batch_size' above 0": ("max_batch_size: 8", "max_batch_size: 0"),
    "takes input 'ends', which the configuration does not declare": ('"ends"', '"bounds"'),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_configuration_is_refused_in_one_line(folder: Path, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as refused:
        loaded(folder, CONFIG.replace(*REFUSED[text]))
    assert "\n" not in str(refused.value)


def test_an_output_of_another_size_than_the_requests_is_an_error(folder: Path) -> None:
    layout = ragged.RaggedLayout(loaded(folder).config)
    requests = [asked([1, 2]), asked([1, 2, 3])]
    for name, shape in (("twice", (4,)), ("total", (3, 1))):
        wrong = InferResponse("m", 1, [Tensor(name, Datatype.FP32, np.zeros(shape, "f4"))])
        with pytest.raises(Internal, match=f"output '{name}' has "):
            layout.split(wrong, requests)
