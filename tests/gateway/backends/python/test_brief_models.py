"""Models that answer in a moment: the loop waits for them, and for nothing else."""

from __future__ import annotations

import asyncio
import contextvars
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import uvloop

from modelport.gateway.backends.backend_host import Host
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.python import backend as python_backend
from modelport.gateway.backends.python import python_process
from modelport.gateway.backends.python.backend import PythonBackend
from modelport.gateway.backends.python.instance import AHEAD, Instance
from modelport.gateway.errors import ModelportError
from modelport.gateway.repository import config
from modelport.gateway.settings import PythonModels
from modelport.gateway.types import (
    NO_DEADLINE,
    Datatype,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)
from tests.gateway.backends.python import python_models

#: Sleeps as many seconds as ``x`` says; below 0, it fails.
SLEEPS = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(r, "x")) for r in requests]

    def answer(self, x):
        seconds = float(x.as_numpy()[0])
        if seconds < 0:
            raise ValueError("below 0")
        if seconds:
            time.sleep(seconds)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())])
"""
TENSORS = (
    'input { name: "x" data_type: TYPE_FP32 dims: 1 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
)
#: Until the model is known to be brief, however busy the machine is.
MANY = 5000
Body = Callable[[PythonBackend], Awaitable[None]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Body], None]]:
    """Runs a test on the event loop of a loaded model."""
    folder = python_models.model(tmp_path_factory.mktemp("models"), "m", SLEEPS, TENSORS)

    def unused(*_: Any) -> Any:
        raise AssertionError

    async def load() -> PythonBackend:
        host = Host(asyncio.get_running_loop(), unused, unused, unused, unused)
        parsed = config.complete(config.parse(f'name: "m" backend: "python" {TENSORS}'), "m")
        artifact = Artifact("m", 1, folder, parsed, 1, host=host, python=PythonModels())
        return await asyncio.to_thread(python_backend.load, artifact)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        backend = runner.run(load())
        yield lambda body: runner.run(_called(body, backend))
        runner.run(asyncio.to_thread(backend.unload))


async def _called(body: Body, backend: PythonBackend) -> None:
    await body(backend)


def request(seconds: float = 0.0) -> InferRequest:
    return InferRequest("m", [Tensor("x", Datatype.FP32, np.array([seconds], np.float32))])


async def brief(backend: PythonBackend) -> None:
    """Ask until a request is answered in its call, and this turn of the loop has ended."""
    for _ in range(MANY):
        answer = backend(request(), NO_DEADLINE)
        if isinstance(answer, InferResponse):
            await asyncio.sleep(0)
            return
        await answer
    raise AssertionError("no request was answered in its call")


def test_requests_one_by_one_are_answered_in_their_call(run: Callable[[Body], None]) -> None:
    async def body(backend: PythonBackend) -> None:
        await brief(backend)
        # Of two requests in one turn of the loop, the second one does not wait in its call, nor do
        # the next ones.
        for end_of_turn in (False, True):
            answers = [backend(request(), NO_DEADLINE) for _ in range(2)]
            assert not isinstance(answers[1], InferResponse)
            await asyncio.gather(*map(finished, answers))
            assert isinstance(answers[0], InferResponse) <= (not end_of_turn)

    run(body)


def test_an_error_is_raised_in_the_call_or_later(run: Callable[[Body], None]) -> None:
    async def body(backend: PythonBackend) -> None:
        for _ in range(3):
            await brief(backend)
            with pytest.raises(ModelportError, match="below 0"):
                await finished(backend(request(-1.0), NO_DEADLINE))

    run(body)


def test_a_bounded_number_is_sent_ahead_and_the_others_wait(run: Callable[[Body], None]) -> None:
    async def body(backend: PythonBackend) -> None:
        await brief(backend)
        first = backend(request(0.05), NO_DEADLINE)  # the others arrive while it is computed
        others = [backend(request(), NO_DEADLINE) for _ in range(AHEAD + 6)]
        (instance,) = backend._instances
        assert len(instance) == AHEAD
        assert backend._queued == 7
        for each in (first, *others):
            assert isinstance(await finished(each), InferResponse)

    run(body)


async def slow(backend: PythonBackend) -> bool:
    """Whether a slow request of a model that was brief is answered in its call."""
    await brief(backend)
    answer = backend(request(0.2), NO_DEADLINE)
    if isinstance(answer, InferResponse):
        return True
    await answer
    return False


@pytest.mark.parametrize("longest", [python_process._SOON_MILLISECONDS, None])
def test_the_loop_waits_no_longer_than_a_moment(
    run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch, longest: int | None
) -> None:
    monkeypatch.setattr(python_process, "_SOON_MILLISECONDS", longest)

    async def body(backend: PythonBackend) -> None:
        assert await slow(backend) is (longest is None)  # None: as long as it takes

    run(body)


def test_another_event_ends_the_wait(
    run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_process, "_SOON_MILLISECONDS", None)

    theirs, ours = socket.socketpair()

    async def body(backend: PythonBackend) -> None:
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        loop.add_reader(ours.fileno(), lambda: arrived.done() or arrived.set_result(None))
        await brief(backend)
        theirs.send(b"x")
        answer = backend(request(0.2), NO_DEADLINE)
        assert not isinstance(answer, InferResponse)
        await arrived
        loop.remove_reader(ours.fileno())
        await answer

    with theirs, ours:
        run(body)


def test_frames_are_received_in_no_requests_context(
    run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = contextvars.ContextVar("variable", default="")
    seen, received = [], Instance.received

    def noted(self: Instance, frame: Any) -> None:
        seen.append(variable.get())
        received(self, frame)

    monkeypatch.setattr(Instance, "received", noted)

    async def body(backend: PythonBackend) -> None:
        variable.set("a request's")
        await brief(backend)
        assert len(seen) > 1
        assert set(seen) == {""}

    run(body)
