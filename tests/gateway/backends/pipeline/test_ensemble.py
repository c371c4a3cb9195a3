"""Ensembles: steps as soon as they can, one failure ends all, and what does not fit is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.gateway.backends.backend_host import Host
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.pipeline.ensemble import load
from modelport.gateway.backends.pipeline.graph_backend import GraphBackend
from modelport.gateway.errors import (
    InvalidArgument,
    ModelportError,
    NotFound,
    TimedOut,
    Unavailable,
)
from modelport.gateway.repository import config
from modelport.gateway.types import (
    NO_DEADLINE,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
)
from tests import models
from tests.server import serving

Answer = Callable[[InferRequest, Deadline], Awaitable[InferResponse]]


def step(
    model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], version: int = -1
) -> str:
    maps = [
        *(f'input_map {{ key: "{k}" value: "{v}" }}' for k, v in inputs.items()),
        *(f'output_map {{ key: "{k}" value: "{v}" }}' for k, v in outputs.items()),
    ]
    return f'step {{ model_name: "{model}" model_version: {version} {" ".join(maps)} }}'


def text(
    *steps: str, inputs: str = "in FP32 4", outputs: str = "out FP32 4", batch: int = 8
) -> str:
    described = models.config("e", [inputs], [outputs], batch, "")
    described = described.replace('backend: ""', 'platform: "ensemble"')
    return f"{described}\nensemble_scheduling {{ {' '.join(steps)} }}"


def double(
    name: str, batch: int = 8, datatype: str = "FP32", dims: str = "4"
) -> config.ModelConfig:
    parsed = models.config(name, [f"x {datatype} {dims}"], [f"y {datatype} {dims}"], batch)
    return config.complete(config.parse(parsed), name)


CHAIN = (step("a", {"x": "in"}, {"y": "middle"}), step("b", {"x": "middle"}, {"y": "out"}))
AB = {name: double(name) for name in "ab"}


async def twice(request: InferRequest, deadline: Deadline) -> InferResponse:
    (x,) = request.inputs
    return InferResponse(request.model_name, 1, [Tensor("y", x.datatype, x.data * 2)])


async def streamed(
    request: InferRequest, deadline: Deadline
) -> AsyncGenerator[InferResponse, None]:
    """The number of responses that the first value says, counted up from it."""
    (x,) = request.inputs
    for index in range(int(x.data.flat[0])):
        yield InferResponse(request.model_name, 1, [Tensor("y", x.datatype, x.data + index)])


def host(
    known: Mapping[str, config.ModelConfig], answer: Answer = twice, stream: Any = streamed
) -> Host:
    def config_of(name: str, version: int) -> config.ModelConfig:
        if name not in known:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version > 1:
            raise Unavailable(f"Request for unknown model: '{name}' version 2 is not ready")
        return known[name]

    return Host(
        loop=asyncio.new_event_loop() if not known else None,  # type: ignore[arg-type]
        infer=answer,
        config_of=config_of,
        stream=stream,
        labels_of=lambda name, version, output: (),
    )


def ensemble(
    described: str,
    known: Mapping[str, config.ModelConfig] = AB,
    answer: Answer = twice,
    stream: Any = streamed,
) -> GraphBackend:
    completed = config.complete(config.parse(described), "e")
    return load(Artifact("e", 1, Path(), completed, 1, host=host(known, answer, stream)))


def request(*outputs: str) -> InferRequest:
    return InferRequest("e", [Tensor("in", Datatype.FP32, np.ones((2, 4), np.float32))], outputs)


# -- running --------------------------------------------------------------------------------------


async def test_steps_follow_one_another_and_the_answer_is_the_ensembles_own() -> None:
    response = await ensemble(text(*CHAIN))(request(), NO_DEADLINE)
    assert (response.model_name, response.model_version) == ("e", 1)
    assert [(t.name, t.data.tolist()) for t in response.outputs] == [("out", [[4.0] * 4] * 2)]


async def test_steps_may_be_written_in_any_order() -> None:
    response = await ensemble(text(*reversed(CHAIN)))(request(), NO_DEADLINE)
    assert response.outputs[0].data.tolist() == [[4.0] * 4] * 2


FORK = (
    step("a", {"x": "in"}, {"y": "left"}),
    step("b", {"x": "in"}, {"y": "right"}),
    step("join", {"l": "left", "r": "right"}, {"y": "out"}),
)
JOIN = {
    **AB,
    "join": config.complete(
        config.parse(models.config("join", ["l FP32 4", "r FP32 4"], ["y FP32 4"])), "join"
    ),
}


async def test_steps_that_do_not_need_one_another_run_at_once() -> None:
    both = asyncio.Barrier(2)

    async def answer(asked: InferRequest, deadline: Deadline) -> InferResponse:
        if asked.model_name != "join":
            await both.wait()  # passed by two at once, or never
        data = sum((t.data for t in asked.inputs), np.zeros((2, 4), np.float32))
        return InferResponse(asked.model_name, 1, [Tensor("y", Datatype.FP32, data)])

    async with asyncio.timeout(60):
        response = await ensemble(text(*FORK), JOIN, answer)(request(), NO_DEADLINE)
    assert response.outputs[0].data.tolist() == [[2.0] * 4] * 2


async def test_one_failing_step_cancels_the_others_and_is_the_answer() -> None:
    cancelled = asyncio.Event()

    async def answer(asked: InferRequest, deadline: Deadline) -> InferResponse:
        if asked.model_name == "b":
            raise InvalidArgument("unexpected shape for input 'x' for model 'b'")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    async with asyncio.timeout(60):
        with pytest.raises(InvalidArgument, match="for model 'b'"):
            await ensemble(text(*FORK), JOIN, answer)(request(), NO_DEADLINE)
    assert cancelled.is_set()


async def test_a_cancelled_request_leaves_no_step_behind() -> None:
    begun, ended = asyncio.Semaphore(0), []

    async def answer(asked: InferRequest, deadline: Deadline) -> InferResponse:
        begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(asked.model_name)
        raise AssertionError

    task = asyncio.create_task(ensemble(text(*FORK), JOIN, answer)(request(), NO_DEADLINE))
    await begun.acquire()
    await begun.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == ["a", "b"]


async def test_the_deadline_goes_with_every_step() -> None:
    seen: list[Deadline] = []

    async def answer(asked: InferRequest, deadline: Deadline) -> InferResponse:
        seen.append(deadline)
        if len(seen) == 2:
            raise TimedOut
        return await twice(asked, deadline)

    deadline = Deadline.after(10)
    with pytest.raises(TimedOut):
        await ensemble(text(*CHAIN), AB, answer)(request(), deadline)
    assert seen == [deadline, deadline]


async def test_only_the_steps_behind_the_outputs_asked_for_run() -> None:
    asked_for: list[str] = []

    async def answer(asked: InferRequest, deadline: Deadline) -> InferResponse:
        asked_for.append(asked.model_name)
        return await twice(asked, deadline)

    described = text(
        step("a", {"x": "in"}, {"y": "out"}), step("b", {"x": "in"}, {"y": "other"})
    ).replace("output {", 'output { name: "other" data_type: TYPE_FP32 dims: 4 } output {')
    backend = ensemble(described, AB, answer)
    response = await backend(request("out"), NO_DEADLINE)
    assert (asked_for, [t.name for t in response.outputs]) == (["a"], ["out"])
    response = await backend(request(), NO_DEADLINE)
    assert [t.name for t in response.outputs] == ["other", "out"]


async def test_a_step_may_name_a_version() -> None:
    versions: list[int] = []

    async def answer(asked: InferRequest, deadline: Deadline) -> InferResponse:
        versions.append(asked.model_version)
        return await twice(asked, deadline)

    described = text(CHAIN[0], step("b", {"x": "middle"}, {"y": "out"}, 1))
    await ensemble(described, AB, answer)(request(), NO_DEADLINE)
    assert versions == [0, 1]


async def test_a_model_that_is_gone_since_is_unavailable_and_not_unknown() -> None:
    async def answer(asked: InferRequest, deadline: Deadline) -> InferResponse:
        raise NotFound("Request for unknown model: 'a' is not found")

    with pytest.raises(Unavailable, match="in ensemble 'e': Request for unknown model: 'a'"):
        await ensemble(text(*CHAIN), AB, answer)(request(), NO_DEADLINE)


@pytest.mark.parametrize(
    "data", [np.ones((2, 4), np.float64), np.ones((2, 5), np.float32), np.ones(2, np.float32)]
)
async def test_a_model_that_answers_otherwise_than_when_it_was_loaded_is_caught(
    data: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> None:
    async def answer(asked: InferRequest, deadline: Deadline) -> InferResponse:
        datatype = Datatype.FP64 if data.dtype == np.float64 else Datatype.FP32
        return InferResponse(asked.model_name, 1, [Tensor("y", datatype, data)])

    with pytest.raises(Unavailable, match=r"'out' is declared FP32 .* model 'b' now returns"):
        await ensemble(text(*CHAIN), AB, answer)(request(), NO_DEADLINE)


# -- checked at load ------------------------------------------------------------------------------


def refused(described: str, known: Mapping[str, config.ModelConfig] = AB) -> ModelportError:
    with pytest.raises(ModelportError) as caught:
        ensemble(described, known)
    return caught.value


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (text(), "must specify 'step' for ensemble 'e'"),
        (text('step { model_name: "a" }'), "must specify 'input_map' in step 0 of ensemble 'e'"),
        (text(step("", {"x": "in"}, {"y": "out"})), "must specify 'model_name' in step 0"),
        (text(step("a", {"x": "in"}, {})), "must specify 'output_map' in step 0"),
        (
            text(step("a", {"x": "in"}, {"y": "out"}), step("b", {"x": "in"}, {"y": "out"})),
            "ensemble tensor 'out' can appear in an output map only once for ensemble 'e' step 1",
        ),
        (text(step("a", {"x": "in"}, {"y": "in"})), "'in' can appear in an output map only once"),
        (text(step("a", {"x": "in"}, {"y": "z"})), "output 'out' for ensemble 'e' is not written"),
        (
            text(*CHAIN, inputs="other FP32 4"),
            "ensemble input 'other' for ensemble 'e' is not used",
        ),
        (
            text(
                step("a", {"x": "in"}, {"y": "out"}),
                step("a", {"x": "q"}, {"y": "p"}),
                step("b", {"x": "p"}, {"y": "q"}),
            ),
            "ensemble tensor 'p' is unused in ensemble 'e'",
        ),
        (
            text(step("a", {"x": "loop"}, {"y": "out"}), step("b", {"x": "out"}, {"y": "loop"})),
            "ensemble input 'in' for ensemble 'e' is not used",
        ),
        (
            text(step("a", {"z": "in"}, {"y": "out"})),
            "ensemble tensor 'in' is mapping to non-existing input 'z' in model 'a'",
        ),
        (
            text(step("a", {"x": "in"}, {"z": "out"})),
            "ensemble tensor 'out' is mapped from non-existing output 'z' in model 'a'",
        ),
        (
            text(*CHAIN, batch=16),
            "ensemble 'e' allows maximum batch size 16, but it contains model 'a' which only",
        ),
        (
            text(*CHAIN, outputs="out INT32 4"),
            "ensemble tensor 'out': inconsistent data type: TYPE_INT32 is inferred from model 'e' "
            "while TYPE_FP32 is inferred from model 'b'",
        ),
        (
            text(*CHAIN, inputs="in FP32 5"),
            "ensemble tensor 'in': inconsistent shape: [-1,5] is inferred from model 'e' while "
            "[-1,4] is inferred from model 'a'",
        ),
        (text(step("e", {"x": "in"}, {"y": "out"})), "circular dependency between ensembles: e -"),
    ],
)
def test_what_does_not_fit_together_is_refused(described: str, reason: str) -> None:
    error = refused(described)
    assert isinstance(error, InvalidArgument)
    assert reason in str(error)


def test_models_that_do_not_fit_one_another_are_refused() -> None:
    known = {"a": double("a"), "b": double("b", datatype="INT32")}
    assert "TYPE_FP32 is inferred from model 'a' while TYPE_INT32" in str(
        refused(text(*CHAIN), known)
    )
    known = {"a": double("a"), "b": double("b", dims="5")}
    assert "inconsistent shape: [-1,4] is inferred from model 'a'" in str(
        refused(text(*CHAIN), known)
    )


def test_a_model_that_does_not_batch_fits_if_its_shape_holds_the_batch() -> None:
    ensemble(text(*CHAIN), {"a": double("a"), "b": double("b", 0, dims="-1,4")})
    ensemble(text(*CHAIN), {"a": double("a"), "b": double("b", 0)})  # for a batch of one
    assert "inconsistent shape" in str(
        refused(text(*CHAIN), {"a": double("a"), "b": double("b", 0, dims="5")})
    )


def test_an_input_that_nothing_is_mapped_to_is_refused() -> None:
    described = text(step("join", {"l": "in"}, {"y": "out"}))
    assert "input 'r' in model 'join' is not mapped to any" in str(refused(described, JOIN))


def test_an_ensemble_that_leads_back_to_itself_is_refused() -> None:
    inner = config.complete(config.parse(text(step("e", {"x": "in"}, {"y": "out"}))), "e")
    inner.name = "inner"
    described = text(step("inner", {"in": "in"}, {"out": "out"}))
    known = {**AB, "inner": inner}
    assert "between ensembles: e -> inner -> e" in str(refused(described, known))


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (text(step("c", {"x": "in"}, {"y": "out"})), "depends on 'c' which has no version loaded"),
        (
            text(step("a", {"x": "in"}, {"y": "out"}, 2)),
            "depends on 'a' whose required version 2 is not loaded",
        ),
    ],
)
def test_a_model_that_is_not_ready_is_waited_for(described: str, reason: str) -> None:
    error = refused(described)
    assert isinstance(error, Unavailable)
    assert reason in str(error)


# -- a gateway ------------------------------------------------------------------------------------


def test_a_gateway_serves_an_ensemble_and_survives_a_model_that_changes(tmp_path: Path) -> None:
    import httpx

    for name in "ab":
        models.multiply(tmp_path / name / "1" / "model.onnx")
        described = models.config(name, ["x FP32 4"], ["y FP32 4"])
        (tmp_path / name / "config.pbtxt").write_text(described)
    (tmp_path / "e" / "1").mkdir(parents=True)
    (tmp_path / "e" / "config.pbtxt").write_text(text(*CHAIN))
    flags = ("--model-control-mode", "explicit", "--load-model", "*")
    with serving(tmp_path, *flags) as gateway, httpx.Client(base_url=f"http://{gateway.http}") as c:
        gateway.wait_for("model version is ready", model="e")
        body = {"inputs": [{"name": "in", "datatype": "FP32", "shape": [1, 4], "data": [1] * 4}]}

        def ask() -> httpx.Response:
            return c.post("/v2/models/e/infer", json=body)

        assert ask().json()["outputs"][0]["data"] == [4.0] * 4
        assert c.get("/v2/models/e/config").json()["platform"] == "ensemble"
        body["inputs"][0]["shape"], body["inputs"][0]["data"] = [9, 4], [1] * 36
        assert ask().status_code == 400
        body["inputs"][0]["shape"], body["inputs"][0]["data"] = [1, 4], [1] * 4
        assert c.post("/v2/repository/models/b/unload").status_code == 200
        assert ask().status_code == 404
        assert c.post("/v2/repository/models/b/load").status_code == 200
        assert ask().status_code == 200
        models.add_and_subtract(tmp_path / "b" / "1" / "model.onnx")
        (tmp_path / "b" / "config.pbtxt").write_text('backend: "onnxruntime" max_batch_size: 8')
        assert c.post("/v2/repository/models/b/load").status_code == 200
        answer = ask()
        assert (answer.status_code, "model 'b'" in answer.json()["error"]) == (400, True)
