"""The pool of endpoints: its policy as sentences, and what it does with attempts that fail."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import pytest

from gateway.errors import Internal, InvalidArgument, QueueFull, TimedOut, Unavailable
from gateway.types import NO_DEADLINE, Deadline
from gateway.upstream import Endpoint, EndpointFailed, Failure, Pool, pool, public
from gateway.upstream.grpc import meant
from gateway.upstream.pool import choose, ejection_seconds, ejects


def endpoints(*in_flight: int, ejected: tuple[int, ...] = ()) -> list[Endpoint]:
    return [Endpoint(f"h:{i}", n, ejected=i in ejected) for i, n in enumerate(in_flight)]


def chosen(of: list[Endpoint], turn: int = 0, tried: int | None = None) -> int | None:
    found = choose(of, turn, None if tried is None else of[tried])
    return None if found is None else of.index(found)


# -- the pure part --------------------------------------------------------------------------------


def test_equals_take_turns() -> None:
    assert [chosen(endpoints(0, 0, 0), turn) for turn in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_least_in_flight_goes_first_whoevers_turn_it_is() -> None:
    assert [chosen(endpoints(3, 1, 2), turn) for turn in range(3)] == [1, 1, 1]


def test_an_ejected_endpoint_is_not_asked() -> None:
    assert [chosen(endpoints(9, 0, 9, ejected=(1,)), turn) for turn in range(3)] == [0, 2, 2]


def test_the_endpoint_that_failed_is_not_the_second_choice() -> None:
    assert chosen(endpoints(0, 5), 0, tried=0) == 1
    assert chosen(endpoints(0), 0, tried=0) is None


def test_nothing_is_chosen_when_all_are_ejected() -> None:
    assert chosen(endpoints(0, 0, ejected=(0, 1))) is None


def test_one_refused_connection_ejects_and_the_last_endpoint_too() -> None:
    assert ejects(Failure.REFUSED, 1, others=True)
    assert ejects(Failure.REFUSED, 1, others=False)


def test_one_dropped_connection_may_have_been_stale_two_in_a_row_eject() -> None:
    assert not ejects(Failure.DROPPED, 1, others=True)
    assert ejects(Failure.DROPPED, 2, others=False)


@pytest.mark.parametrize(
    "failure", [Failure.DAMAGED, Failure.HUNG, Failure.UNREADY, Failure.MISSING]
)
def test_bad_answers_in_a_row_eject_but_never_the_last_endpoint(failure: Failure) -> None:
    assert not ejects(failure, 2, others=True)
    assert ejects(failure, 3, others=True)
    assert not ejects(failure, 100, others=False)


def test_each_ejection_in_a_row_lasts_twice_as_long_up_to_a_maximum() -> None:
    assert [ejection_seconds(n) for n in (1, 2, 3, 4, 5, 6, 10_000)] == [0.5, 1, 2, 4, 8, 10, 10]


# -- the effects ----------------------------------------------------------------------------------


class Servers:
    """Fake endpoints ``a``, ``b`` ...: each does what ``behave`` says, for requests and probes."""

    def __init__(self, names: str = "ab", timeout: float = 5.0) -> None:
        self.asked: list[str] = []
        self.probed: list[str] = []
        self.wrong: dict[str, Exception] = {}
        self.hangs: set[str] = set()
        self.pool = Pool(
            "m", list(names), self.probe, timeout_seconds=timeout, connect_timeout_seconds=0.2
        )

    async def probe(self, endpoint: Endpoint) -> None:
        self.probed.append(endpoint.address)
        if endpoint.address in self.wrong:
            raise self.wrong[endpoint.address]

    async def attempt(self, endpoint: Endpoint, limit: Deadline) -> str:
        self.asked.append(endpoint.address)
        if endpoint.address in self.hangs:
            await asyncio.Event().wait()
        if endpoint.address in self.wrong:
            raise self.wrong[endpoint.address]
        return endpoint.address

    async def ask(self, deadline: Deadline = NO_DEADLINE) -> str:
        return await self.pool.call(self.attempt, deadline)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "EJECTION_SECONDS", 0.02)
    monkeypatch.setattr(pool, "MAX_EJECTION_SECONDS", 0.05)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def refused() -> EndpointFailed:
    return EndpointFailed(Failure.REFUSED, "connection refused")


async def test_requests_go_round() -> None:
    servers = Servers("abc")
    assert sorted([await servers.ask() for _ in range(6)]) == list("aabbcc")


async def test_a_request_that_met_a_dead_endpoint_is_answered_by_another_one() -> None:
    servers = Servers()
    servers.wrong["a"] = refused()
    assert [await servers.ask() for _ in range(10)] == ["b"] * 10
    assert servers.asked.count("a") == 1, "ejected at once"
    servers.pool.close()


async def test_all_dead_is_unavailable_at_once_with_the_reason_and_asks_nobody() -> None:
    servers = Servers()
    servers.wrong = {"a": refused(), "b": refused()}
    with pytest.raises(Unavailable):
        await servers.ask()
    said = "the server that runs 'm' cannot be reached: connection refused"
    assert servers.pool.problem == said
    servers.asked.clear()
    started = time.monotonic()
    for _ in range(1000):
        with pytest.raises(Unavailable, match=said):
            await servers.ask()
    assert servers.asked == []
    assert time.monotonic() - started < 1.0
    servers.pool.close()


@pytest.mark.usefixtures("quick")
async def test_a_probe_and_no_request_brings_an_endpoint_back() -> None:
    servers = Servers()
    servers.wrong = {"a": refused(), "b": refused()}
    with pytest.raises(Unavailable):
        await servers.ask()
    servers.asked.clear()
    await until(lambda: len(servers.probed) >= 4)
    assert servers.pool.problem
    servers.wrong.clear()
    await until(lambda: not servers.pool.problem)
    assert servers.asked == []
    await until(lambda: not any(e.ejected for e in servers.pool.endpoints))
    assert {await servers.ask() for _ in range(4)} == {"a", "b"}


async def test_start_ejects_what_does_not_serve_and_fails_when_nothing_does() -> None:
    servers = Servers()
    servers.wrong["a"] = EndpointFailed(Failure.UNREADY)
    await servers.pool.start()
    assert [await servers.ask() for _ in range(3)] == ["b"] * 3
    servers.pool.close()
    servers = Servers()
    servers.wrong = {"a": refused(), "b": refused()}
    with pytest.raises(Unavailable, match="cannot be reached"):
        await servers.pool.start()
    servers.pool.close()


async def test_a_stale_connection_is_tried_again_on_the_only_endpoint() -> None:
    servers = Servers("a")
    calls = 0

    async def attempt(endpoint: Endpoint, limit: Deadline) -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise EndpointFailed(Failure.DROPPED)
        return "fine"

    assert await servers.pool.call(attempt, NO_DEADLINE) == "fine"
    assert not servers.pool.problem


@pytest.mark.parametrize("error", [InvalidArgument("x"), Internal("x"), QueueFull()])
async def test_what_the_model_says_is_final_and_ejects_nobody(error: Exception) -> None:
    servers = Servers()
    servers.wrong = {"a": error, "b": error}
    for number in range(1, 11):
        with pytest.raises(type(error)):
            await servers.ask()
        assert len(servers.asked) == number
    assert not any(e.ejected for e in servers.pool.endpoints)


async def test_a_damaged_answer_is_asked_for_elsewhere_and_is_internal_if_there_is_nobody() -> None:
    servers = Servers()
    servers.wrong["a"] = EndpointFailed(Failure.DAMAGED, "output 'y' is missing")
    assert [await servers.ask() for _ in range(20)] == ["b"] * 20
    assert servers.asked.count("a") == 3, "ejected after the third in a row"
    servers.pool.close()
    servers = Servers("a")
    servers.wrong["a"] = EndpointFailed(Failure.DAMAGED, "output 'y' is missing")
    for _ in range(20):
        with pytest.raises(Internal, match="gave a damaged answer: output 'y' is missing"):
            await servers.ask()
    assert not servers.pool.problem, "the last one stays: it may be one client's doing"


async def test_a_hung_server_costs_the_routes_timeout_and_is_ejected_where_others_are() -> None:
    servers = Servers(timeout=0.05)
    servers.hangs.add("a")
    timed_out = 0
    for _ in range(20):
        started = time.monotonic()
        try:
            assert await servers.ask() == "b"
        except TimedOut:
            timed_out += 1
        assert time.monotonic() - started < 0.15
    assert timed_out == 3
    servers.pool.close()


async def test_the_last_endpoint_that_hangs_is_ejected_once_a_probe_finds_the_same(
    quick: None,
) -> None:
    servers = Servers("a", timeout=0.02)
    servers.hangs.add("a")
    for _ in range(5):
        with pytest.raises(TimedOut):
            await servers.ask()
    assert servers.probed, "only requests hang: it may be one client's doing"
    assert not servers.pool.problem
    servers.wrong["a"] = EndpointFailed(Failure.REFUSED, "no answer")
    with pytest.raises(TimedOut):
        await servers.ask()
    await until(lambda: bool(servers.pool.problem))
    asked = len(servers.asked)
    with pytest.raises(Unavailable, match="cannot be reached: no answer"):
        await servers.ask()
    assert len(servers.asked) == asked
    servers.hangs.clear()
    servers.wrong.clear()
    await until(lambda: not servers.pool.problem)
    assert await servers.ask() == "a"
    servers.pool.close()


async def test_a_clients_own_short_deadline_ejects_nobody() -> None:
    servers = Servers(timeout=5)
    servers.hangs = {"a", "b"}
    for _ in range(10):
        with pytest.raises(TimedOut):
            await servers.ask(Deadline.after(0.01))
    assert not any(e.ejected or e.failures for e in servers.pool.endpoints)


async def test_nothing_is_tried_again_after_the_deadline() -> None:
    servers = Servers()

    async def attempt(endpoint: Endpoint, limit: Deadline) -> str:
        servers.asked.append(endpoint.address)
        while not limit.expired:  # without letting the timer fire
            time.sleep(0.001)
        raise refused()

    with pytest.raises(Unavailable):
        await servers.pool.call(attempt, Deadline.after(0.01))
    assert len(servers.asked) == 1
    servers.pool.close()


async def test_a_caller_that_goes_away_cancels_its_attempt_and_leaves_no_trace() -> None:
    servers = Servers("a")
    servers.hangs.add("a")
    asking = asyncio.ensure_future(servers.ask())
    await until(lambda: servers.asked == ["a"])
    assert servers.pool.endpoints[0].in_flight == 1
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert servers.pool.endpoints[0].in_flight == 0
    assert servers.pool.endpoints[0].failures == 0


async def amplification(requests: int) -> float:
    """Attempts for each request, where every second attempt fails."""
    servers, attempts = Servers("abc"), 0

    async def attempt(endpoint: Endpoint, limit: Deadline) -> str:
        nonlocal attempts
        attempts += 1
        if attempts % 2:
            raise EndpointFailed(Failure.DAMAGED)
        return "fine"

    for _ in range(requests):
        with contextlib.suppress(Internal):
            await servers.pool.call(attempt, NO_DEADLINE)
    servers.pool.close()
    return attempts / requests


async def test_retries_stay_within_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await amplification(1000) <= 1.2
    monkeypatch.setattr(pool, "EARNED_PER_REQUEST", 1.0)  # the check sees a budget that is none
    assert await amplification(1000) > 1.2


# -- words ----------------------------------------------------------------------------------------


def test_what_another_server_says_is_cleaned_of_folders_addresses_and_traces() -> None:
    said = "in ensemble, failed to open '/opt/models/x/1/model.py' at 10.0.0.5:8001\nAt:\n  File"
    assert public(said) == "in ensemble, failed to open 'model.py' at the server"
    assert public("ipv4:127.0.0.1:80: broken") == "the server: broken"
    assert public("shape [1,4] / 3.5 and/or 1/2") == "shape [1,4] / 3.5 and/or 1/2"


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        ("INVALID_ARGUMENT", "x", InvalidArgument),
        ("UNAVAILABLE", "[request id: 1] Exceeds maximum queue size", QueueFull),
        ("UNAVAILABLE", "Request timeout expired", TimedOut),
        ("RESOURCE_EXHAUSTED", "", QueueFull),
        ("DEADLINE_EXCEEDED", "", TimedOut),
        ("UNKNOWN", "", Internal),
    ],
)
def test_statuses_keep_their_meaning(status: str, said: str, kind: type[Exception]) -> None:
    assert type(meant(status, said)) is kind


@pytest.mark.parametrize(
    ("status", "failure"),
    [("NOT_FOUND", Failure.MISSING), ("UNAVAILABLE", Failure.UNREADY)],
)
def test_a_server_without_the_model_is_its_own_fault(status: str, failure: Failure) -> None:
    error = meant(status, "no")
    assert isinstance(error, EndpointFailed)
    assert error.failure is failure
