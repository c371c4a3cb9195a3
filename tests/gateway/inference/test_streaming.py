"""Streams of responses past the wire: made on demand, counted, cancelled, and in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.gateway.backends.base import Artifact, Execution
from modelport.gateway.errors import Decoupled, Internal, InvalidArgument, ModelportError, TimedOut
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.repository import config as configuration
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.types import (
    NO_DEADLINE,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)

CONFIG = """
backend: "scripted"
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 label_filename: "labels.txt" }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
Script = Callable[[InferRequest], AsyncGenerator[InferResponse, None]]


class ScriptedStream:
    """A backend that streams what the test says."""

    problem = ""
    execution = Execution()

    def __init__(self, config: Any, script: Script) -> None:
        self.config = config
        self._script = script
        self.asked: list[InferRequest] = []
        self.closed = 0

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        self.asked.append(request)
        return response()

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        self.asked.append(request)
        try:
            async with aclosing(self._script(request)) as responses:
                async for each in responses:
                    yield each
        finally:
            self.closed += 1

    def unload(self) -> None: ...


class Unstreaming(ScriptedStream):
    stream = None  # type: ignore[assignment]


def response(value: float = 0.0) -> InferResponse:
    return InferResponse("m", 1, [Tensor("y", Datatype.FP32, np.array([value, 1], np.float32))])


async def count(request: InferRequest) -> AsyncGenerator[InferResponse, None]:
    for number in range(3):
        yield response(number)


async def nothing(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
    return
    yield


async def one_then_never(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
    yield response(7)
    await asyncio.Event().wait()


def one_then(error: Exception) -> Script:
    async def script(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield response()
        raise error

    return script


async def collect(
    stream: AsyncGenerator[InferResponse, None],
) -> tuple[list[InferResponse], Exception | None]:
    """The responses, and what ended them."""
    found: list[InferResponse] = []
    try:
        async with asyncio.timeout(60):
            async for each in stream:
                found.append(each)  # noqa: PERF401 - those before an error count
    except ModelportError as error:
        return found, error
    return found, None


class StreamingService:
    def __init__(self, service: InferenceService, manager: ModelManager) -> None:
        self.service = service
        self.version: ServedVersion = manager.get("m")
        backend = self.version.backend
        assert isinstance(backend, ScriptedStream)
        self.backend = backend
        self.statistics = self.version.statistics

    def request(self, *shape: int, **rest: Any) -> InferRequest:
        return InferRequest(
            "m", [Tensor("x", Datatype.FP32, np.zeros(shape or (2,), np.float32))], **rest
        )

    def stream(
        self, *shape: int, deadline: Deadline = NO_DEADLINE, **rest: Any
    ) -> AsyncGenerator[InferResponse, None]:
        return self.service.stream(self.request(*shape, **rest), deadline)

    def nothing_is_left(self) -> None:
        assert self.version.in_flight == 0
        assert self.statistics.pending == 0


Serve = Callable[..., Awaitable[StreamingService]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    async def make(
        script: Script,
        policy: str = DECOUPLED,
        kind: type[ScriptedStream] = ScriptedStream,
        **limits: float,
    ) -> StreamingService:
        (tmp_path / "m" / "1").mkdir(parents=True)
        (tmp_path / "m" / "config.pbtxt").write_text(CONFIG + policy)
        (tmp_path / "m" / "labels.txt").write_text("cat\ndog\n")

        def load(artifact: Artifact) -> ScriptedStream:
            return kind(configuration.complete(artifact.config, "m"), script)

        settings = Settings((tmp_path,), ModelControlMode.NONE)
        manager = ModelManager(settings, lambda _: load)
        await manager.start()
        return StreamingService(InferenceService(manager, **limits), manager)

    return make


async def test_responses_come_in_order_with_their_requests_id_and_are_counted(
    serve: Serve,
) -> None:
    served = await serve(count)
    found = [each async for each in served.stream(id="mine")]
    assert [(each.id, each.outputs[0].data[0]) for each in found] == [("mine", n) for n in range(3)]
    document = served.statistics.document("m", 1)
    assert document["inference_stats"]["success"]["count"] == document["execution_count"] == 1
    responses = document["response_stats"]
    assert list(responses) == ["0", "1", "2", "3"]
    assert [responses[key]["success"]["count"] for key in responses] == [1, 1, 1, 0]
    assert responses["3"]["empty_response"]["count"] == 1
    assert sum(served.statistics.first_response) == 1
    served.nothing_is_left()


async def test_the_first_responses_time_is_not_that_of_the_whole_stream(serve: Serve) -> None:
    async def slow_end(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield response()
        await asyncio.sleep(0.15)

    served = await serve(slow_end)
    assert len([each async for each in served.stream()]) == 1
    assert served.statistics.first_response[0] == 1  # within 100 ms
    assert served.statistics.success.ns > 150_000_000 > served.statistics.first_response_ns


async def test_a_stream_may_hold_nothing(serve: Serve) -> None:
    served = await serve(nothing)
    assert [each async for each in served.stream()] == []
    assert served.statistics.success.count == 1
    served.nothing_is_left()


async def test_nothing_is_made_that_is_not_asked_for(serve: Serve) -> None:
    made = 0

    async def endless(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        nonlocal made
        while True:
            made += 1
            yield response()

    served = await serve(endless)
    async with aclosing(served.stream()) as responses:
        for _ in range(5):
            await anext(responses)
        await asyncio.sleep(0)
        assert made == 5
    assert served.backend.closed == 1
    served.nothing_is_left()


async def test_closing_the_stream_stops_the_work(serve: Serve) -> None:
    served = await serve(count)
    async with aclosing(served.stream()) as responses:
        await anext(responses)
        assert (served.version.in_flight, served.statistics.pending) == (1, 1)
    assert served.backend.closed == 1
    assert served.statistics.failures["CANCELED"] == 1
    served.nothing_is_left()


async def test_cancelling_the_reader_of_a_stream_stops_the_work(serve: Serve) -> None:
    served = await serve(one_then_never)
    first = asyncio.Event()

    async def consume() -> None:
        async with aclosing(served.stream()) as responses:
            async for _ in responses:
                first.set()

    task = asyncio.create_task(consume())
    await asyncio.wait_for(first.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert served.backend.closed == 1
    assert served.statistics.failures["CANCELED"] == 1
    assert served.statistics.response(1).cancel.count == 1
    served.nothing_is_left()


async def test_a_deadline_ends_a_stream_between_its_responses(serve: Serve) -> None:
    served = await serve(one_then_never)
    deadline = Deadline.after(0.05)
    found, error = await collect(served.stream(deadline=deadline))
    assert isinstance(error, TimedOut)
    assert deadline.expired
    assert len(found) == 1
    assert served.backend.closed == 1
    served.nothing_is_left()


async def test_the_configured_maximum_ends_a_stream_too(serve: Serve) -> None:
    served = await serve(one_then_never, max_seconds=0.05)
    _, error = await collect(served.stream(deadline=Deadline.after(60)))
    assert isinstance(error, TimedOut)
    served.nothing_is_left()


@pytest.mark.parametrize("known_bad", [False, True])
async def test_a_deadline_that_has_passed_starts_no_stream(
    serve: Serve, known_bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(count)
    if known_bad:  # without the check the backend is asked: the test can fail
        monkeypatch.setattr(Deadline, "expired", False)
    _, error = await collect(served.stream(deadline=Deadline.after(0)))
    assert isinstance(error, TimedOut) is not known_bad
    assert bool(served.backend.asked) is known_bad
    served.nothing_is_left()


@pytest.mark.parametrize(
    ("error", "expected", "reason"),
    [
        (InvalidArgument("no"), InvalidArgument, "OTHER"),
        (RuntimeError("/secret"), Internal, "BACKEND"),
    ],
)
async def test_an_error_behind_a_response_ends_the_stream(
    serve: Serve, error: Exception, expected: type[ModelportError], reason: str
) -> None:
    served = await serve(one_then(error))
    found, caught = await collect(served.stream())
    assert len(found) == 1
    assert isinstance(caught, expected)
    assert "secret" not in str(caught)
    assert served.statistics.failures[reason] == 1
    assert served.statistics.response(1).fail.count == 1
    served.nothing_is_left()


async def test_an_invalid_request_never_reaches_the_backend(serve: Serve) -> None:
    served = await serve(count)
    with pytest.raises(InvalidArgument, match="unexpected shape for input 'x'"):
        await anext(served.stream(3))
    assert served.backend.asked == []
    served.nothing_is_left()


async def test_classification_holds_for_every_response(serve: Serve) -> None:
    served = await serve(count)
    found = [each async for each in served.stream(classification={"y": 1})]
    assert found[0].outputs[0].data.tolist() == [b"1.000000:1:dog"]
    assert len(found) == 3


async def test_a_decoupled_model_is_not_asked_for_one_answer(serve: Serve) -> None:
    served = await serve(count)
    with pytest.raises(Decoupled):
        await finished(served.service.infer(served.request(), NO_DEADLINE))
    assert served.backend.asked == []
    served.nothing_is_left()


async def test_a_decoupled_models_batching_is_checked_though_it_has_no_effect(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelportError, match="no available versions"):
        await serve(count, policy=f"{DECOUPLED} dynamic_batching {{ preferred_batch_size: 0 }}")
    assert "dynamic batching preferred size must be positive for m" in capsys.readouterr().out


async def test_any_other_model_streams_its_one_answer(serve: Serve) -> None:
    served = await serve(count, policy="")
    found = [each async for each in served.stream(id="1")]
    assert [each.id for each in found] == ["1"]
    assert served.statistics.document("m", 1)["response_stats"] == {}


async def test_a_backend_that_cannot_stream_gives_its_one_answer(serve: Serve) -> None:
    served = await serve(count, kind=Unstreaming)
    assert len([each async for each in served.stream()]) == 1


async def test_what_is_counted_by_place_stays_bounded(serve: Serve) -> None:
    async def long(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        for _ in range(3000):
            yield response()

    served = await serve(long)
    assert len([each async for each in served.stream()]) == 3000
    assert len(served.statistics.responses) == 1024
