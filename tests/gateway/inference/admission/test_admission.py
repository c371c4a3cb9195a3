"""Admission: what would wait too long is refused when it comes. In virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import math

import numpy as np
import pytest

from modelport.gateway.backends.base import ELSEWHERE, Execution
from modelport.gateway.errors import InvalidArgument, QueueFull
from modelport.gateway.inference import admission
from modelport.gateway.inference.admission import QueueTimeLimit
from modelport.gateway.repository import config as configuration
from modelport.gateway.types import (
    NO_DEADLINE,
    Datatype,
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)

QUEUE = "dynamic_batching { default_queue_policy { %s } }"
BOUNDED = QUEUE % "default_timeout_microseconds: 20000"
SERVICE_SECONDS = 0.01


class OneByOneServer:
    """Answers one after the other, as one busy instance does."""

    def __init__(self, seconds: float = SERVICE_SECONDS) -> None:
        self._turn = asyncio.Lock()
        self._seconds = seconds
        self.waits: list[float] = []

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        come = asyncio.get_running_loop().time()
        async with self._turn:
            self.waits.append(asyncio.get_running_loop().time() - come)
            request.timing.queue_ns = int(self.waits[-1] * 1e9) + 1
            await asyncio.sleep(self._seconds)
        request.timing.compute_infer_ns = int(self._seconds * 1e9)
        return InferResponse("m", 1, [])


class CompanyServer:
    """Answers two at once, the first of which has waited for the second."""

    def __init__(self) -> None:
        self._first: asyncio.Event | None = None

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        come = asyncio.get_running_loop().time()
        if self._first is None:
            self._first = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._first.wait(), 1)
            self._first = None
        else:
            self._first.set()
        request.timing.queue_ns = int((asyncio.get_running_loop().time() - come) * 1e9) + 1
        return InferResponse("m", 1, [])


def request(**parameters: int) -> InferRequest:
    inputs = [Tensor("x", Datatype.FP32, np.zeros((1, 4), np.float32))]
    return InferRequest("m", inputs, parameters=parameters)


def admitted(infer: Infer, text: str) -> Infer:
    return admission.wrap(infer, configuration.parse(f'name: "m" max_batch_size: 1 {text}'))


async def flood(infer: Infer, seconds: float, per_second: float) -> tuple[int, int]:
    """Answered and refused, open loop."""
    loop = asyncio.get_running_loop()
    start, tasks = loop.time(), []
    while (now := loop.time()) < start + seconds:
        due = int((now - start) * per_second) + 1 - len(tasks)
        tasks += [
            asyncio.ensure_future(finished(infer(request(), NO_DEADLINE))) for _ in range(due)
        ]
        await asyncio.sleep(0.001)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = sum(isinstance(result, QueueFull) for result in results)
    assert refused + sum(isinstance(result, InferResponse) for result in results) == len(results)
    return len(results) - refused, refused


async def warm(infer: Infer) -> None:
    """So many answers that the interval between them is known."""
    for _ in range(5):
        await finished(infer(request(), NO_DEADLINE))


async def test_under_ten_times_too_much_the_wait_stays_what_the_policy_allows() -> None:
    server = OneByOneServer()
    infer = admitted(server, BOUNDED)
    await warm(infer)
    server.waits.clear()
    answered, refused = await flood(infer, 0.5, 10 / SERVICE_SECONDS)
    # The machine is busy: what counts is the number in front, whatever each of them takes.
    assert sorted(server.waits)[len(server.waits) // 2] < 8 * SERVICE_SECONDS
    assert refused > 4 * answered
    assert answered >= 10


async def test_the_check_sees_a_queue_without_admission() -> None:
    server = OneByOneServer()
    answered, refused = await flood(server, 0.2, 10 / SERVICE_SECONDS)
    assert refused == 0
    assert sorted(server.waits)[answered // 2] > 8 * SERVICE_SECONDS


async def test_what_comes_one_by_one_is_never_refused() -> None:
    infer = admitted(OneByOneServer(), QUEUE % "default_timeout_microseconds: 1")
    await warm(infer)


class CountsWaiting(QueueTimeLimit):
    """Known bad: the interval between responses has the wait of a request for others."""

    def _count(self, begun: float) -> None:
        super()._count(0.0)


@pytest.mark.parametrize("kind", [QueueTimeLimit, CountsWaiting])
async def test_waiting_for_a_batch_to_fill_is_no_overload(
    kind: type[QueueTimeLimit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "QueueTimeLimit", kind)
    infer = admitted(CompanyServer(), BOUNDED)
    for _ in range(3):
        answers = [asyncio.ensure_future(finished(infer(request(), NO_DEADLINE)))]
        await asyncio.sleep(0.05)  # longer than the policy's timeout
        answers += [asyncio.ensure_future(finished(infer(request(), NO_DEADLINE)))]
        results = await asyncio.gather(*answers, return_exceptions=True)
    refused = any(isinstance(result, QueueFull) for result in results)
    assert refused is (kind is CountsWaiting)


async def test_it_recovers_at_once_and_a_failure_or_a_cancel_leaves_nothing_behind() -> None:
    server = OneByOneServer()
    infer = admitted(server, BOUNDED)
    await warm(infer)
    tasks = [asyncio.ensure_future(finished(infer(request(), NO_DEADLINE))) for _ in range(30)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(infer, admission.QueueTimeLimit)
    assert infer.wait_seconds(0) == 0
    await finished(infer(request(), NO_DEADLINE))


async def test_a_request_may_allow_less_than_the_policy_where_that_allows_it() -> None:
    policy = "default_timeout_microseconds: 10000000 allow_timeout_override: true"
    infer = admitted(OneByOneServer(), QUEUE % policy)
    await warm(infer)
    behind = [asyncio.ensure_future(finished(infer(request(), NO_DEADLINE))) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await finished(infer(request(timeout=1000), NO_DEADLINE))
    await finished(infer(request(), NO_DEADLINE))
    await asyncio.gather(*behind)


LEVELS = "dynamic_batching { priority_levels: 2 default_priority_level: 2 %s }"
FIRST = LEVELS % "priority_queue_policy { key: 1 value { default_timeout_microseconds: 20000 } }"


async def test_those_of_a_lower_priority_are_not_in_front() -> None:
    infer = admitted(OneByOneServer(), FIRST)
    await warm(infer)
    behind = [
        asyncio.ensure_future(finished(infer(request(priority=2), NO_DEADLINE))) for _ in range(30)
    ]
    await asyncio.sleep(0)
    assert isinstance(infer, admission.QueueTimeLimit)
    assert infer.wait_seconds(2) > 0.1
    await finished(infer(request(priority=1), NO_DEADLINE))
    ahead = [
        asyncio.ensure_future(finished(infer(request(priority=1), NO_DEADLINE))) for _ in range(30)
    ]
    refused = await asyncio.gather(*ahead, return_exceptions=True)
    assert any(isinstance(each, QueueFull) for each in refused)
    await asyncio.gather(*behind)


async def test_no_request_waits_while_an_instance_is_free() -> None:
    two = BOUNDED + "instance_group { count: 2 }"
    infer = admitted(OneByOneServer(), two)
    for _ in range(5):
        await finished(infer(request(), NO_DEADLINE))
    assert isinstance(infer, admission.QueueTimeLimit)
    running = asyncio.ensure_future(finished(infer(request(), NO_DEADLINE)))
    await asyncio.sleep(0)
    assert infer.wait_seconds(0) == 0
    both = asyncio.ensure_future(finished(infer(request(), NO_DEADLINE)))
    await asyncio.sleep(0)
    assert infer.wait_seconds(0) > 0
    await asyncio.gather(running, both)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dynamic_batching { }",
        QUEUE % "max_queue_size: 3",
        QUEUE % "default_timeout_microseconds: 1000 timeout_action: DELAY",
    ],
)
def test_without_a_bound_on_the_wait_nothing_stands_between(text: str) -> None:
    server: Infer = pytest.fail  # never called
    assert admitted(server, text) is server


# -- without a policy -----------------------------------------------------------------------------

QUEUES = Execution(batches=False, queues=True)
LEAST = 'parameters { key: "admission_control_min_pending_requests" value { string_value: "%d" } }'
ON = 'parameters { key: "admission_control" value { string_value: "true" } }'
OFF = ON.replace("true", "false")


def guarded(infer: Infer, text: str = "", execution: Execution = QUEUES) -> Infer:
    config = configuration.parse(f'name: "m" max_batch_size: 1 {text}')
    return admission.wrap(infer, config, execution)


def overloaded(guard: admission.OverloadGuard, limit: int, probes: bool = False) -> None:
    guard._controller.limit = limit
    guard._controller._probe_at = 0.0 if probes else math.inf


@pytest.mark.parametrize("many", [3, 40])
async def test_a_probe_holds_what_comes_and_lets_it_in_unless_more_keep_coming(many: int) -> None:
    infer = guarded(OneByOneServer())
    assert isinstance(infer, admission.OverloadGuard)
    running = [asyncio.ensure_future(finished(infer(request(), NO_DEADLINE))) for _ in range(2)]
    await asyncio.sleep(0)
    overloaded(infer, 2, probes=True)
    assert not infer.refuses(), "it begins the probe"
    held = [asyncio.ensure_future(finished(infer(request(), NO_DEADLINE))) for _ in range(3)]
    await asyncio.sleep(0)
    assert infer._controller.held == 3
    held.pop().cancel()
    infer._controller._probe_began -= 0.03  # its second half
    held += [
        asyncio.ensure_future(finished(infer(request(), NO_DEADLINE))) for _ in range(many - 3)
    ]
    results = await asyncio.gather(*running, *held, return_exceptions=True)
    refused = sum(isinstance(result, QueueFull) for result in results)
    assert refused == (0 if many == 3 else many - 1)
    assert infer._controller.held == 0
    assert (infer._controller.limit == math.inf) is (many == 3)


async def test_by_default_an_overload_is_refused_and_the_queue_it_made_is_cut() -> None:
    server = OneByOneServer()
    infer = guarded(server, LEAST % 20)
    answered, refused = await flood(infer, 1.0, 10 / SERVICE_SECONDS)
    assert refused > 4 * answered
    late = sorted(server.waits)[len(server.waits) * 3 // 4]
    assert late < 8 * SERVICE_SECONDS
    assert isinstance(infer, admission.OverloadGuard)
    assert not infer._in_flight


@pytest.mark.parametrize("looks", [True, False], ids=["", "known-bad: only an arrival ends it"])
async def test_an_overload_ends_although_no_request_comes_any_more(
    looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not looks:
        monkeypatch.setattr(admission.OverloadGuard, "_look_later", lambda self: None)
    models: admission.OverloadedModels = set()
    config = configuration.parse(f'name: "m" max_batch_size: 1 {LEAST % 20}')
    infer = admission.wrap(OneByOneServer(), config, QUEUES, models)
    await flood(infer, 0.4, 10 / SERVICE_SECONDS)
    assert isinstance(infer, admission.OverloadGuard)
    assert (infer.overloaded(), len(models)) == (True, 1)
    await asyncio.sleep(5)
    assert (infer.overloaded(), len(models)) == (not looks, int(not looks))


async def test_a_request_that_is_cut_is_refused_and_one_that_is_cancelled_is_cancelled() -> None:
    infer = guarded(OneByOneServer(), LEAST % 20)
    assert isinstance(infer, admission.OverloadGuard)
    tasks = [asyncio.ensure_future(finished(infer(request(), NO_DEADLINE))) for _ in range(30)]
    await asyncio.sleep(0)
    tasks[20].cancel()
    overloaded(infer, 3)
    infer._shorten()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], InferResponse)  # it had begun
    assert isinstance(results[1], QueueFull)
    assert isinstance(results[20], asyncio.CancelledError)
    assert sum(isinstance(result, QueueFull) for result in results) >= 26
    assert sum(isinstance(result, InferResponse) for result in results) >= 2


async def test_a_request_whose_deadline_cannot_be_met_is_refused_when_it_comes() -> None:
    infer = guarded(OneByOneServer())
    behind = [asyncio.ensure_future(finished(infer(request(), NO_DEADLINE))) for _ in range(60)]
    await asyncio.gather(*behind[:20])
    refused = asyncio.ensure_future(finished(infer(request(), Deadline.after(0.02))))
    await asyncio.sleep(0)
    assert isinstance(refused.exception(), QueueFull)
    late = asyncio.ensure_future(finished(infer(request(), Deadline.after(60))))
    await asyncio.gather(*behind, late)


async def test_a_deadline_is_held_against_those_in_front_alone() -> None:
    infer = guarded(OneByOneServer(), LEVELS % "")
    behind = [asyncio.ensure_future(finished(infer(request(), NO_DEADLINE))) for _ in range(60)]
    await asyncio.gather(*behind[:20])
    with pytest.raises(QueueFull):
        await finished(infer(request(priority=2), Deadline.after(0.02)))
    await finished(infer(request(priority=1), Deadline.after(0.02)))
    await asyncio.gather(*behind)


async def test_an_overload_is_cut_from_the_lowest_priority_up() -> None:
    infer = guarded(OneByOneServer(), LEVELS % "")
    assert isinstance(infer, admission.OverloadGuard)
    levels = [2, 1, 1, 2, 2, 1, 2]
    asked = [infer(request(priority=level), NO_DEADLINE) for level in levels]
    tasks = [asyncio.ensure_future(each) for each in asked]
    await asyncio.sleep(0)
    overloaded(infer, 4)
    assert not infer.refuses()  # it may be one that goes first
    infer._shorten()
    with pytest.raises(QueueFull):
        await finished(infer(request(priority=2), NO_DEADLINE))
    tasks.append(asyncio.ensure_future(finished(infer(request(priority=1), NO_DEADLINE))))
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    cut = [isinstance(each, QueueFull) for each in answers]
    assert cut == [False, False, False, True, True, False, True, False]


async def test_what_is_answered_at_once_is_not_counted() -> None:
    async def infer(request: InferRequest, deadline: Deadline) -> InferResponse:
        return InferResponse("m", 1, [])

    execution = Execution(batches=False, queues=True, inline=lambda _: True)
    guard = guarded(infer, LEAST % 1, execution)
    for _ in range(1000):
        await guard(request(), NO_DEADLINE)
    assert isinstance(guard, admission.OverloadGuard)
    assert not guard.refuses()


@pytest.mark.parametrize(
    ("text", "execution", "on"),
    [
        ("", QUEUES, True),
        ("", ELSEWHERE, False),
        (OFF, QUEUES, False),
        ("dynamic_batching { }", Execution(batches=False), True),
        ("dynamic_batching { }", ELSEWHERE, False),
        (QUEUE % "max_queue_size: 3", QUEUES, False),
        (QUEUE % "max_queue_size: 3" + ON, QUEUES, True),
    ],
)
def test_it_is_on_where_requests_wait_here_and_no_policy_bounds_their_queue(
    text: str, execution: Execution, on: bool
) -> None:
    assert isinstance(guarded(pytest.fail, text, execution), admission.OverloadGuard) is on


@pytest.mark.parametrize("text", [LEAST % 0, ON.replace("true", "perhaps")])
def test_a_parameter_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="admission_control"):
        guarded(pytest.fail, text)


def test_a_model_that_runs_elsewhere_cannot_have_it() -> None:
    with pytest.raises(InvalidArgument, match="the server that runs it"):
        guarded(pytest.fail, ON, ELSEWHERE)
