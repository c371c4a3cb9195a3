"""The way of a request past the wire: checked, answered in time, counted, its handle released."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.gateway.backends.base import Artifact, Execution
from modelport.gateway.errors import (
    Code,
    Internal,
    InvalidArgument,
    ModelportError,
    TimedOut,
    Unavailable,
)
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.repository import config as configuration
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.telemetry import Statistics
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
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 label_filename: "labels.txt" }
"""
Answer = Callable[[InferRequest], Awaitable[InferResponse]]


class ScriptedBackend:
    """A backend that does what the test says."""

    execution = Execution()

    def __init__(self, config: Any, answer: Answer) -> None:
        self.config = config
        self._answer = answer
        self.asked: list[InferRequest] = []
        self.cancelled = 0

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        self.asked.append(request)
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def unload(self) -> None: ...


async def echo(request: InferRequest) -> InferResponse:
    return InferResponse("m", 1, [Tensor("y", Datatype.FP32, request.inputs[0].data)])


async def never(_: InferRequest) -> InferResponse:
    await asyncio.Event().wait()
    raise AssertionError


def failing(error: Exception) -> Answer:
    async def answer(_: InferRequest) -> InferResponse:
        raise error

    return answer


class ScriptedService:
    """A data plane over one model whose backend is scripted."""

    def __init__(self, service: InferenceService, manager: ModelManager) -> None:
        self.service = service
        self.version: ServedVersion = manager.get("m")
        backend = self.version.backend
        assert isinstance(backend, ScriptedBackend)
        self.backend = backend

    @property
    def statistics(self) -> Statistics:
        return self.version.statistics

    async def ask(self, *shape: int, deadline: Deadline = NO_DEADLINE, **rest: Any) -> Any:
        data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        request = InferRequest("m", [Tensor("x", Datatype.FP32, data)], **rest)
        return await finished(self.service.infer(request, deadline))


Serve = Callable[[Answer], Awaitable[ScriptedService]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    async def make(answer: Answer) -> ScriptedService:
        (tmp_path / "m" / "1").mkdir(parents=True)
        (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
        (tmp_path / "m" / "labels.txt").write_text("cat\ndog\n")

        def load(artifact: Artifact) -> ScriptedBackend:
            return ScriptedBackend(configuration.complete(artifact.config, "m"), answer)

        settings = Settings((tmp_path,), ModelControlMode.NONE)
        manager = ModelManager(settings, lambda _: load)
        await manager.start()
        return ScriptedService(InferenceService(manager), manager)

    return make


def nothing_is_left(served: ScriptedService) -> None:
    assert served.version.in_flight == 0
    assert served.statistics.pending == 0


async def test_an_answer_carries_its_requests_id_and_is_counted(serve: Serve) -> None:
    served = await serve(echo)
    response = await served.ask(3, 2, id="mine")
    assert response.id == "mine"
    assert response.outputs[0].data.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert served.statistics.inference_count == 3
    assert served.statistics.execution_count == served.statistics.success.count == 1
    nothing_is_left(served)


async def test_a_request_in_flight_is_pending_and_holds_its_version(serve: Serve) -> None:
    served = await serve(never)
    task = asyncio.create_task(served.ask(1, 2))
    async with asyncio.timeout(60):
        while not served.backend.asked:
            await asyncio.sleep(0)
    assert (served.version.in_flight, served.statistics.pending) == (1, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert served.backend.cancelled == 1
    assert served.statistics.failures["CANCELED"] == 1
    nothing_is_left(served)


async def test_an_invalid_request_never_reaches_the_backend(serve: Serve) -> None:
    served = await serve(echo)
    with pytest.raises(InvalidArgument, match="unexpected shape for input 'x'"):
        await served.ask(1, 3)
    assert served.backend.asked == []
    assert served.statistics.failures["OTHER"] == 1
    nothing_is_left(served)


async def test_a_deadline_that_has_passed_never_reaches_the_backend(serve: Serve) -> None:
    served = await serve(echo)
    with pytest.raises(TimedOut):
        await served.ask(1, 2, deadline=Deadline.after(0))
    assert served.backend.asked == []
    nothing_is_left(served)


async def test_no_backend_outlives_a_deadline_and_it_is_cancelled(serve: Serve) -> None:
    served = await serve(never)
    deadline = Deadline.after(0.05)
    with pytest.raises(TimedOut, match=r"^Request timeout expired$"):
        await asyncio.wait_for(served.ask(1, 2, deadline=deadline), 60)
    assert deadline.expired
    assert served.backend.cancelled == 1
    assert served.statistics.failures["REJECTED"] == 1
    nothing_is_left(served)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Unavailable("Exceeds maximum queue size"), "REJECTED"), (Internal("broken"), "BACKEND")],
)
async def test_a_backends_own_error_is_passed_on(
    error: ModelportError, reason: str, serve: Serve
) -> None:
    served = await serve(failing(error))
    with pytest.raises(type(error), match=str(error)):
        await served.ask(1, 2)
    assert served.statistics.failures[reason] == 1
    assert served.statistics.success.count == 0
    nothing_is_left(served)


async def test_any_other_failure_is_internal_and_reveals_no_details(
    serve: Serve,
) -> None:
    served = await serve(failing(RuntimeError("/secret/path of host 10.0.0.1")))
    with pytest.raises(Internal) as caught:
        await served.ask(1, 2)
    assert caught.value.code is Code.INTERNAL
    for inside in ("secret", "10.0.0.1", "RuntimeError"):
        assert inside not in str(caught.value)
    assert served.statistics.failures["BACKEND"] == 1
    nothing_is_left(served)


async def test_classification_is_given_in_place_of_the_output_it_is_asked_for(
    serve: Serve,
) -> None:
    served = await serve(echo)
    response = await served.ask(1, 2, classification={"y": 1})
    assert response.outputs[0].data.tolist() == [[b"1.000000:1:dog"]]


async def test_another_caller_waits_for_one_request_of_a_flood_and_not_for_all(
    serve: Serve,
) -> None:
    going: list[asyncio.Future[None]] = []

    async def held(request: InferRequest) -> InferResponse:
        going.append(asyncio.get_running_loop().create_future())
        await going[-1]
        return await echo(request)

    served = await serve(held)

    def asked(caller: str) -> asyncio.Task[Any]:
        return asyncio.create_task(served.ask(1, 2, caller=caller))

    turns = served.version.turns
    flood = [asked("flood") for _ in range(turns.free + turns.room + 5)]
    await asyncio.sleep(0)
    assert len(going) == len(flood), "a caller that is alone does not wait"
    waiting = [asked("other"), *(asked("flood") for _ in range(5)), asked("other")]
    own = asked("")
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(going) == len(flood) + 1, "the gateway's own requests take no turns"
    for number in range(len(flood) + 1 + len(waiting)):
        going[number].set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)
    await asyncio.gather(*flood, own, *waiting)
    order = [request.caller for request in served.backend.asked[len(flood) + 1 :]]
    assert order == ["other", "flood", "other", *["flood"] * 4]
    assert served.statistics.success.count == len(going)
    assert served.statistics.queue.ns > 0
    nothing_is_left(served)
