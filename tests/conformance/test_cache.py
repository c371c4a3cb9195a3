"""The response cache in a real server, whichever way it is called."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from prometheus_client.parser import text_string_to_metric_families

from tests import models
from tests.conformance.clients import CALLERS, Ask, InferCaller, Output, bits, samples
from tests.conformance.repository import add
from tests.server import Gateway, serving

CACHED = "response_cache { enable: true }"
#: No response larger than this is kept.
SIZE_BYTES = 64 * 1024
DATATYPES = ("FP32", "INT64", "BOOL", "BYTES")


def identity(root: Path, datatype: str) -> str:
    name = f"cached_{datatype.lower()}"
    text = models.config(name, [f"x {datatype} -1"], [f"y {datatype} -1"], extra=CACHED)
    models.identity(add(root, name, text), datatype, ("batch", "n"))
    return name


def build(root: Path) -> Path:
    for datatype in DATATYPES:
        identity(root, datatype)
    for name, factor in (("double", 2.0), ("triple", 3.0)):
        text = models.config(name, ["x FP32 4"], ["y FP32 4"], extra=CACHED)
        models.multiply(add(root, name, text), factor)
    inputs, outputs = ["a FP32 -1", "b FP32 -1"], ["total FP32 -1", "difference FP32 -1"]
    text = models.config("both", inputs, outputs, extra=CACHED)
    models.add_and_subtract(add(root, "both", text))
    text = models.config("uncached", ["x FP32 4"], ["y FP32 4"])
    models.multiply(add(root, "uncached", text))
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cached") / "models")


@pytest.fixture(scope="module")
def cached(root: Path) -> Iterator[Gateway]:
    flags = ("--cache-config", f"local,size={SIZE_BYTES}")
    explicit = ("--model-control-mode", "explicit", "--load-model", "*")
    with serving(root, *flags, *explicit) as gateway:
        yield gateway


@pytest.fixture(scope="module", params=list(CALLERS))
def caller(
    request: pytest.FixtureRequest, cached: Gateway, runner: asyncio.Runner
) -> Iterator[InferCaller]:
    opened = CALLERS[request.param](cached, runner)
    yield opened
    opened.close()


def client_of(gateway: Gateway) -> Any:
    return tritonclient.http.InferenceServerClient(gateway.http)


def counts(gateway: Gateway, model: str) -> dict[str, int]:
    """The model's counts of successes, executions, inferences, cache hits and cache misses."""
    with client_of(gateway) as client:
        (row,) = client.get_inference_statistics(model)["model_stats"]
    stats = row["inference_stats"]
    for key in ("cache_hit", "cache_miss"):
        assert (stats[key]["count"] > 0) == (stats[key]["ns"] > 0)
    found = {key: stats[key]["count"] for key in ("success", "cache_hit", "cache_miss")}
    return {**found, "executed": row["execution_count"], "inferred": row["inference_count"]}


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {key: after[key] - before[key] for key in after}


HIT = {"success": 1, "cache_hit": 1, "cache_miss": 0, "executed": 0, "inferred": 0}


def miss(batch: int) -> dict[str, int]:
    return {"success": 1, "cache_hit": 0, "cache_miss": 1, "executed": 1, "inferred": batch}


def drive(gateway: Gateway, caller: InferCaller, ask: Ask) -> list[dict[str, int]]:
    """Send a request twice, compare the answers bit for bit, and return the counts of each."""
    found, steps = [], []
    for _ in range(2):
        before = counts(gateway, ask.model)
        found.append(caller.infer(ask))
        steps.append(difference(before, counts(gateway, ask.model)))
    first, second = found
    assert first.datatypes == second.datatypes
    for name, array in first.arrays.items():
        assert bits(array) == bits(second.arrays[name])
    return steps


@pytest.mark.parametrize("datatype", DATATYPES)
def test_a_hit_is_the_miss_again_in_every_bit_and_executes_nothing(
    cached: Gateway, caller: InferCaller, datatype: str, request: pytest.FixtureRequest
) -> None:
    own = {"asked_by": request.node.name}  # other callers' answers are others'
    ask = Ask(f"cached_{datatype.lower()}", [("x", samples()[datatype])], parameters=own)
    assert drive(cached, caller, ask) == [miss(2), HIT]


def test_json_and_bytes_share_answers(cached: Gateway, runner: asyncio.Runner) -> None:
    caller = CALLERS["http"](cached, runner)
    x = np.float32([[1, 2, 3, 4.1]])
    before = counts(cached, "double")
    answers = []
    for binary_in in (True, False):
        for binary_out in (True, False):
            ask = Ask("double", [("x", x)], [Output("y", binary_out)], binary_input=binary_in)
            answers.append(caller.infer(ask).arrays["y"])
    assert all(bits(answer) == bits(answers[0]) for answer in answers)
    told = difference(before, counts(cached, "double"))
    assert told == {"success": 4, "cache_hit": 3, "cache_miss": 1, "executed": 1, "inferred": 1}


def test_equal_inputs_of_two_models_do_not_mix(cached: Gateway, caller: InferCaller) -> None:
    x = np.float32([[1, 2, 3, 4]])
    for _ in range(2):
        for model, factor in (("double", 2), ("triple", 3)):
            answer = caller.infer(Ask(model, [("x", x)])).arrays["y"]
            assert answer.tolist() == (x * factor).tolist()


def test_the_outputs_asked_for_are_part_of_the_content(
    cached: Gateway, caller: InferCaller
) -> None:
    inputs = [("a", np.float32([[3, 4]])), ("b", np.float32([[1, 1]]))]
    expected = {"total": [[4, 5]], "difference": [[2, 3]]}
    orders = (None, ("difference",), ("total",), ("difference", "total"), ("total", "difference"))
    for names in orders * 2:
        outputs = None if names is None else [Output(name) for name in names]
        arrays = caller.infer(Ask("both", inputs, outputs)).arrays
        assert tuple(arrays) == (names or ("total", "difference"))
        assert {name: array.tolist() for name, array in arrays.items()} == {
            name: expected[name] for name in arrays
        }


def test_classification_is_made_of_the_cached_answer(cached: Gateway, caller: InferCaller) -> None:
    x = np.float32([[5, 7, 6, 4.5]])
    for count in (1, 2, 0, 2):
        answer = caller.infer(Ask("triple", [("x", x)], [Output("y", class_count=count)]))
        (array,) = answer.arrays.values()
        if count:
            texts = [item.decode() if isinstance(item, bytes) else item for item in array[0]]
            assert texts == ["21.000000:1", "18.000000:2"][:count]
        else:
            assert array.tolist() == (x * 3).tolist()


def test_a_failure_is_not_kept(cached: Gateway, caller: InferCaller) -> None:
    before = counts(cached, "double")
    for _ in range(2):
        caller.refusal(Ask("double", [("x", np.float32([[1, 2, 3]]))]))
    told = difference(before, counts(cached, "double"))
    assert (told["cache_hit"], told["cache_miss"]) == (0, 0)


def test_an_answer_larger_than_the_cache_is_computed_each_time(
    cached: Gateway, caller: InferCaller
) -> None:
    x = np.zeros((1, SIZE_BYTES // 4), np.float32)
    for step in drive(cached, caller, Ask("cached_fp32", [("x", x)])):
        assert step == miss(1)


def test_a_model_that_does_not_ask_for_it_is_not_cached(
    cached: Gateway, caller: InferCaller
) -> None:
    for step in drive(cached, caller, Ask("uncached", [("x", np.float32([[1, 2, 3, 4]]))])):
        assert step == {**miss(1), "cache_miss": 0}


def test_a_version_reloaded_with_other_content_gives_its_own_answers(
    root: Path, cached: Gateway, caller: InferCaller
) -> None:
    ask, client = Ask("double", [("x", np.float32([[1, 2, 3, 4]]))]), client_of(cached)
    for factor in (5.0, 6.0, 2.0):
        models.multiply(root / "double" / "1" / "model.onnx", factor)
        client.load_model("double")
        for _ in range(2):
            assert caller.infer(ask).arrays["y"].tolist() == [[factor * i for i in (1, 2, 3, 4)]]


def test_the_metrics_are_tritons_and_only_of_models_with_a_cache(
    cached: Gateway, runner: asyncio.Runner
) -> None:
    ask = Ask("triple", [("x", np.float32([[9, 9, 9, 9]]))])
    caller = CALLERS["grpc"](cached, runner)
    for _ in range(3):
        caller.infer(ask)
    told = counts(cached, "triple")
    text = urllib.request.urlopen(cached.metrics).read().decode()
    found = {family.name: family.samples for family in text_string_to_metric_families(text)}
    rows: dict[str, dict[str, float]] = {}
    for name in ("num_hits", "num_misses", "hit_duration", "miss_duration"):
        samples = found[f"nv_cache_{name}_per_model"]
        rows[name] = {s.labels["model"]: s.value for s in samples}
        assert "uncached" not in rows[name]
        assert {"triple", "double"} <= set(rows[name])
    assert rows["num_hits"]["triple"] == told["cache_hit"]
    assert rows["num_misses"]["triple"] == told["cache_miss"]
    assert rows["hit_duration"]["triple"] > 0


def test_without_a_cache_a_model_that_asks_for_it_is_served_with_one_warning(
    root: Path, runner: asyncio.Runner
) -> None:
    explicit = ("--model-control-mode", "explicit", "--load-model", "triple")
    with serving(root, *explicit) as gateway:
        caller = CALLERS["http"](gateway, runner)
        for step in drive(gateway, caller, Ask("triple", [("x", np.float32([[1, 2, 3, 4]]))])):
            assert step == {**miss(1), "cache_miss": 0}
        warned = [e for e in gateway.logs if e["event"] == "response_cache has no effect"]
        assert {(e["model"], e["level"]) for e in warned} == {("triple", "warning")}
        assert len(warned) == int(os.environ.get("MODELPORT_WORKERS", "1"))  # each one's own
        assert "--cache-config local,size=BYTES" in warned[0]["reason"]
