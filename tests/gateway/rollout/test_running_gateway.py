"""A rollout in a running gateway: the end of a split under load, ensembles, and bad candidates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from modelport.gateway.backends.capabilities import BackgroundWork
from modelport.gateway.errors import Internal
from modelport.gateway.rollout.traffic import shadow, traffic_split
from modelport.gateway.types import Deadline, InferRequest, InferResponse, finished
from tests.gateway.rollout.gateway import RolloutGateway, repository, serving
from tests.gateway.rollout.test_dialects import OIP, oip_grpc
from tests.polling import until

ENSEMBLE = """
name: "twice"
platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
ensemble_scheduling {
  step { model_name: "m" model_version: -1
         input_map { key: "x" value: "x" } output_map { key: "y" value: "middle" } }
  step { model_name: "m" model_version: 1
         input_map { key: "x" value: "middle" } output_map { key: "y" value: "y" } }
}
"""


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RolloutGateway]:
    folder = repository(tmp_path)
    for number in "12":
        (folder / "twice" / number).mkdir(parents=True)
    policy = "version_policy { all {} }\n"
    (folder / "twice" / "config.pbtxt").write_text(ENSEMBLE + policy)
    async with serving(folder) as found:
        yield found


async def infer(gateway: RolloutGateway, model: str = "m", **headers: str) -> httpx.Response:
    return await gateway.http.post(f"/v2/models/{model}/infer", json=OIP, headers=headers)


class BrokenBackend:
    """A candidate's backend that holds every request, then fails it if told to."""

    def __init__(self, gateway: RolloutGateway, *, fails: bool) -> None:
        self._version = gateway.server.manager.get("m", 2)
        self._infer = self._version.infer
        self._fails = fails
        self.asked = 0
        self.go_on = asyncio.Event()
        self._version.infer = self

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        self.asked += 1
        await self.go_on.wait()
        if self._fails:
            raise Internal("the candidate is broken")
        return await finished(self._infer(request, deadline))


@pytest.mark.parametrize("fails", [False, True])
async def test_requests_in_flight_at_a_stop_are_answered(
    gateway: RolloutGateway, fails: bool
) -> None:
    candidate = BrokenBackend(gateway, fails=fails)
    gateway.apply(1.0)
    over_http = [asyncio.create_task(infer(gateway)) for _ in range(5)]
    over_grpc = [asyncio.create_task(oip_grpc(gateway)) for _ in range(5)]
    await until(lambda: candidate.asked == 10)
    gateway.apply(0.0)
    after = [infer(gateway) for _ in range(20)]
    assert {(await each).json()["model_version"] for each in after} == {"1"}
    assert candidate.asked == 10
    candidate.go_on.set()
    version = "1" if fails else "2"
    answers = await asyncio.gather(*over_http)
    assert [answer.status_code for answer in answers] == [200] * 5
    assert {answer.json()["model_version"] for answer in answers} == {version}
    told = await asyncio.gather(*over_grpc)
    assert {each[1:] for each in told} == {(version, version)}
    assert gateway.counts().candidate.errors == (10 if fails else 0)


async def test_requests_that_hang_at_a_stopped_candidate_are_answered_within_their_deadline(
    gateway: RolloutGateway,
) -> None:
    candidate = BrokenBackend(gateway, fails=False)
    gateway.apply(1.0)
    milliseconds = str(int(traffic_split.STOP_SECONDS * 500))
    header = {"x-envoy-expected-rq-timeout-ms": milliseconds}
    tasks = [asyncio.create_task(infer(gateway, **header)) for _ in range(3)]
    await until(lambda: candidate.asked == 3)
    gateway.apply(0.0)
    answers = await asyncio.gather(*tasks)
    assert {answer.json().get("model_version") for answer in answers} == {"1"}


async def test_no_client_sees_a_shadow_that_fails_or_hangs(
    gateway: RolloutGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = gateway.server.manager.get("m", 2)
    monkeypatch.setattr(shadow, "DEADLINE_SECONDS", 0.05)

    def hang(_: BackgroundWork) -> None: ...

    def fail(work: BackgroundWork) -> None:
        def infer(_: InferRequest) -> InferResponse:
            raise MemoryError("out of memory")

        work(infer)

    gateway.apply(1.0, "shadow")
    for number, broken in enumerate((hang, fail), 1):
        monkeypatch.setattr(version, "in_background", broken)
        answer = await infer(gateway)
        assert (answer.status_code, answer.json()["model_version"]) == (200, "1")
        await until(lambda number=number: gateway.counts().failed == number)
    monkeypatch.undo()
    await infer(gateway)
    await until(lambda: gateway.counts().compared == 1)
    counts = gateway.counts()
    assert (counts.disagreed, counts.errors.total, counts.baseline.requests) == (1, 0, 3)


async def test_a_step_of_an_ensemble_is_diverted_unless_it_names_its_version(
    gateway: RolloutGateway,
) -> None:
    gateway.apply(1.0)
    answer = await infer(gateway, "twice")
    assert answer.json()["outputs"][0]["data"][0] == 3.0 * 2.0
    assert "x-modelport-model-version" not in answer.headers
    assert gateway.counts().candidate.requests == 1


async def test_a_cached_ensemble_follows_the_rollout_of_a_step(tmp_path: Path) -> None:
    folder = repository(tmp_path)
    (folder / "twice" / "1").mkdir(parents=True)
    cached = "response_cache { enable: true }\n"
    (folder / "twice" / "config.pbtxt").write_text(ENSEMBLE + cached)
    async with serving(folder, cache_bytes=2**20) as gateway:

        async def answers() -> list[float]:
            twice = [await infer(gateway, "twice") for _ in range(2)]
            return [answer.json()["outputs"][0]["data"][0] for answer in twice]

        assert await answers() == [4.0, 4.0]
        gateway.apply(1.0)
        assert await answers() == [6.0, 6.0]
        assert gateway.counts().candidate.requests == 2
        gateway.apply(0.0)
        assert await answers() == [4.0, 4.0]


async def test_copies_for_an_ensemble_leave_its_steps_alone(gateway: RolloutGateway) -> None:
    """The steps' statistics see the requests of clients, and no copies."""
    manager = gateway.server.manager
    plan = gateway.plan
    gateway.plan = type(plan).from_json(
        plan.to_json()
        | {
            "model": "twice",
            "baseline": {"model": "twice", "version": 2},
            "candidate": {"model": "twice", "version": 1},
            "default_version": 2,
        }
    )
    gateway.apply(1.0, "shadow")
    answer = await infer(gateway, "twice")
    assert answer.json()["model_version"] == "2"
    await until(lambda: gateway.counts().compared == 1)
    assert gateway.counts().disagreed == 0
    assert manager.get("m", 1).statistics.inference_count == 2  # both steps of the client's
    assert manager.get("twice", 1).statistics.inference_count == 0


async def test_a_candidate_can_be_another_model(gateway: RolloutGateway) -> None:
    """Here an ensemble around the model itself, whose step is not diverted again."""
    document = gateway.plan.to_json() | {"candidate": {"model": "twice", "version": 2}}
    gateway.plan = type(gateway.plan).from_json(document)
    gateway.apply(1.0)
    answer = await infer(gateway)
    assert (answer.json()["model_name"], answer.json()["model_version"]) == ("m", "2")
    assert answer.json()["outputs"][0]["data"][0] == 4.0  # both steps double
    assert answer.headers["x-modelport-model-version"] == "twice/2"
