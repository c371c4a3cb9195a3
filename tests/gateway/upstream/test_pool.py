"""The pool of endpoints: its policy as sentences, and what it does with attempts that fail."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from modelport.gateway.errors import Internal, InvalidArgument, QueueFull, TimedOut, Unavailable
from modelport.gateway.repository.routes_file import OutlierDetection
from modelport.gateway.runtime.timer_wheel import TimeLimit
from modelport.gateway.types import NO_DEADLINE, Deadline
from modelport.gateway.upstream import background, http, pool, retries
from modelport.gateway.upstream.grpc_status import meant, public
from modelport.gateway.upstream.outlier_detection import (
    Endpoint,
    EndpointFailed,
    FailureKind,
    ServerError,
    choose,
    ejection_seconds,
    is_outlier,
    may_eject,
    slow_seconds,
)
from modelport.gateway.upstream.pool import EndpointPool
from modelport.gateway.upstream.retries import NOT_PROCESSED
from tests.polling import until

#: An ejection outlasts any test.
DEFAULT = OutlierDetection(base_ejection_time_seconds=99.0, max_ejection_time_seconds=99.0)
QUICK = OutlierDetection(base_ejection_time_seconds=0.02, max_ejection_time_seconds=0.05)


def endpoints(*in_flight: int, ejected: tuple[int, ...] = ()) -> list[Endpoint]:
    return [
        Endpoint(f"h:{i}", {TimeLimit(None): 0.0 for _ in range(n)}, ejected=i in ejected)
        for i, n in enumerate(in_flight)
    ]


def chosen(of: list[Endpoint], turn: int = 0, tried: int | None = None) -> int | None:
    found = choose(of, turn, None if tried is None else of[tried])
    return None if found is None else of.index(found)


# -- the pure part --------------------------------------------------------------------------------


def test_equals_take_turns() -> None:
    assert [chosen(endpoints(0, 0, 0), turn) for turn in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_endpoint_with_the_fewest_requests_in_flight_is_chosen_at_any_turn() -> None:
    assert [chosen(endpoints(3, 1, 2), turn) for turn in range(3)] == [1, 1, 1]


def test_an_ejected_endpoint_is_not_asked() -> None:
    assert [chosen(endpoints(9, 0, 9, ejected=(1,)), turn) for turn in range(3)] == [0, 2, 2]


def test_the_endpoint_that_failed_is_not_the_second_choice() -> None:
    assert chosen(endpoints(0, 5), 0, tried=0) == 1
    assert chosen(endpoints(0), 0, tried=0) is None


def test_nothing_is_chosen_when_all_are_ejected() -> None:
    assert chosen(endpoints(0, 0, ejected=(0, 1))) is None


def test_an_endpoint_on_trial_gets_one_request_at_a_time() -> None:
    some = endpoints(0, 9)
    some[0].trial = True
    assert chosen(some) == 0
    some = endpoints(1, 9)
    some[0].trial = True
    assert chosen(some) == 1
    assert chosen(endpoints(1)) == 0, "there is no other"


def ejects(failure: FailureKind, failures: int, of: int = 2, ejected: tuple[int, ...] = ()) -> bool:
    some = endpoints(*[0] * of, ejected=ejected)
    some[0].failures = failures
    others = [each for each in some[1:] if not each.ejected]
    outlier = is_outlier(some[0], failure, others, DEFAULT)
    return outlier and may_eject(failure, some, DEFAULT)


@pytest.mark.parametrize("failure", [FailureKind.REFUSED, FailureKind.SILENT])
def test_one_refused_connection_ejects_and_the_last_endpoint_too(failure: FailureKind) -> None:
    assert ejects(failure, 1)
    assert ejects(failure, 1, of=1)


def test_one_dropped_connection_may_have_been_stale_two_in_a_row_eject() -> None:
    assert not ejects(FailureKind.DROPPED, 1)
    assert ejects(FailureKind.DROPPED, 2, of=1)


@pytest.mark.parametrize(
    "failure", [FailureKind.DAMAGED, FailureKind.HUNG, FailureKind.UNREADY, FailureKind.MISSING]
)
def test_bad_answers_in_a_row_eject_but_never_the_last_endpoint(failure: FailureKind) -> None:
    assert not ejects(failure, 2)
    assert ejects(failure, 3)
    assert not ejects(failure, 100, of=1)
    assert not ejects(failure, 100, of=2, ejected=(1,))


def test_five_server_errors_in_a_row_eject_and_full_queues_in_a_row_do_not() -> None:
    assert not ejects(FailureKind.ERRORED, 4)
    assert ejects(FailureKind.ERRORED, 5)
    assert not ejects(FailureKind.FULL, 100)


def test_at_most_half_of_the_endpoints_are_ejected_for_what_they_answer() -> None:
    assert ejects(FailureKind.ERRORED, 5, of=3)
    assert not ejects(FailureKind.ERRORED, 5, of=3, ejected=(1,))
    assert ejects(FailureKind.ERRORED, 5, of=4, ejected=(1,))
    assert not ejects(FailureKind.ERRORED, 5, of=4, ejected=(1, 2))
    assert ejects(FailureKind.REFUSED, 1, of=4, ejected=(1, 2)), "who cannot be reached always is"


@pytest.mark.parametrize(
    ("failed", "elsewhere", "out"),
    [(20, 0, True), (6, 0, True), (3, 0, False), (6, 6, False), (18, 6, True)],
)
def test_an_endpoint_that_fails_more_often_than_the_others_is_an_outlier(
    failed: int, elsewhere: int, out: bool
) -> None:
    one, other = endpoints(0, 0)
    one.failed, one.answered, one.failures = failed, 20 - failed, 1
    other.failed, other.answered = elsewhere, 20 - elsewhere
    assert is_outlier(one, FailureKind.FULL, [other], DEFAULT) is out
    one.answered -= 1
    assert not is_outlier(one, FailureKind.FULL, [other], DEFAULT), "too few requests to tell"


def test_one_failure_on_trial_is_enough() -> None:
    one, other = endpoints(0, 0)
    one.trial = True
    assert is_outlier(one, FailureKind.ERRORED, [other], DEFAULT)


def test_slow_is_what_takes_five_times_as_long_as_elsewhere() -> None:
    some = endpoints(0, 0, 0, ejected=(2,))
    some[1].latency_seconds, some[2].latency_seconds = 0.02, 7.0
    assert slow_seconds(some[0], some, DEFAULT) == pytest.approx(0.2)
    assert slow_seconds(some[1], some, DEFAULT) == float("inf"), "nobody to compare with"
    assert slow_seconds(some[0], some, OutlierDetection(latency_factor=0)) == float("inf")


def test_each_ejection_in_a_row_lasts_twice_as_long_up_to_a_maximum() -> None:
    seconds = [ejection_seconds(n, OutlierDetection()) for n in (1, 2, 3, 4, 5, 10_000)]
    assert seconds == [0.5, 1, 2, 4, 4, 4]


# -- the effects ----------------------------------------------------------------------------------


class Servers:
    """Fake endpoints ``a``, ``b`` ...: each does what ``behave`` says, for requests and probes."""

    def __init__(
        self, names: str = "ab", timeout: float = 5.0, settings: OutlierDetection = DEFAULT
    ) -> None:
        self.asked: list[str] = []
        self.probed: list[str] = []
        self.wrong: dict[str, Exception] = {}
        self.hangs: set[str] = set()
        #: Probes hang, too.
        self.dead: set[str] = set()
        #: Extra seconds of each answer.
        self.slow: dict[str, float] = {}
        self.resets: list[str] = []
        self.pool = EndpointPool(
            "m",
            list(names),
            self.probe,
            timeout_seconds=timeout,
            connect_timeout_seconds=0.2,
            outlier_detection=settings,
            reset=lambda endpoint: self.resets.append(endpoint.address),
        )

    async def probe(self, endpoint: Endpoint) -> None:
        self.probed.append(endpoint.address)
        if endpoint.address in self.dead:
            await asyncio.Event().wait()
        if endpoint.address in self.wrong:
            raise self.wrong[endpoint.address]

    async def attempt(self, endpoint: Endpoint, limit: Deadline) -> str:
        self.asked.append(endpoint.address)
        if endpoint.address in self.hangs:
            await asyncio.Event().wait()
        if endpoint.address in self.wrong:
            raise self.wrong[endpoint.address]
        if endpoint.address in self.slow:
            await asyncio.sleep(self.slow[endpoint.address])
        return endpoint.address

    @property
    def ejected(self) -> set[str]:
        return {endpoint.address for endpoint in self.pool.endpoints if endpoint.ejected}

    async def ask(self, deadline: Deadline = NO_DEADLINE) -> str:
        return await self.pool.call(self.attempt, deadline)


def refused() -> EndpointFailed:
    return EndpointFailed(FailureKind.REFUSED, "connection refused")


async def test_requests_go_round() -> None:
    servers = Servers("abc")
    assert sorted([await servers.ask() for _ in range(6)]) == list("aabbcc")


async def test_a_request_that_met_a_dead_endpoint_is_answered_by_another_one() -> None:
    servers = Servers()
    servers.wrong["a"] = refused()
    assert [await servers.ask() for _ in range(10)] == ["b"] * 10
    assert servers.asked.count("a") == 1, "ejected at once"
    servers.pool.close()


async def test_all_dead_is_unavailable_at_once_with_the_reason_and_without_a_request() -> None:
    servers = Servers()
    servers.wrong = {"a": refused(), "b": refused()}
    with pytest.raises(Unavailable):
        await servers.ask()
    said = "the server that runs 'm' cannot be reached: connection refused"
    assert servers.pool.problem == said
    servers.asked.clear()
    for _ in range(1000):
        with pytest.raises(Unavailable, match=said):
            await servers.ask()
    assert servers.asked == []
    servers.pool.close()


async def test_a_probe_and_no_request_brings_an_endpoint_back() -> None:
    servers = Servers(settings=QUICK)
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
    assert set(servers.resets) == {"a", "b"}, "the probe went over a new connection"


async def test_start_ejects_what_does_not_serve_and_fails_when_nothing_does() -> None:
    servers = Servers()
    servers.wrong["a"] = EndpointFailed(FailureKind.UNREADY)
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
            raise EndpointFailed(FailureKind.DROPPED)
        return "fine"

    assert await servers.pool.call(attempt, NO_DEADLINE) == "fine"
    assert not servers.pool.problem


@pytest.mark.parametrize(
    "error", [InvalidArgument("x"), Internal("x"), http.meant(401, "x"), http.meant(413, "x")]
)
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
    servers.wrong["a"] = EndpointFailed(FailureKind.DAMAGED, "output 'y' is missing")
    assert [await servers.ask() for _ in range(20)] == ["b"] * 20
    assert servers.asked.count("a") == 3, "ejected after the third in a row"
    servers.pool.close()
    servers = Servers("a")
    servers.wrong["a"] = EndpointFailed(FailureKind.DAMAGED, "output 'y' is missing")
    for _ in range(20):
        with pytest.raises(Internal, match="returned an invalid response: output 'y' is missing"):
            await servers.ask()
    assert not servers.pool.problem, "the last one stays: it may be one client's doing"


async def test_a_hung_server_costs_the_routes_timeout_and_is_ejected_where_others_are() -> None:
    servers = Servers(timeout=0.05)
    servers.hangs.add("a")
    timed_out = 0
    for _ in range(20):
        try:
            assert await servers.ask() == "b"
        except TimedOut:
            timed_out += 1
    assert timed_out == 3
    servers.pool.close()


async def test_the_last_endpoint_that_hangs_is_ejected_once_a_probe_finds_the_same() -> None:
    servers = Servers("a", 0.02, QUICK)
    servers.hangs.add("a")
    for _ in range(5):
        with pytest.raises(TimedOut):
            await servers.ask()
    assert servers.probed, "only requests hang: it may be one client's doing"
    assert not servers.pool.problem
    servers.wrong["a"] = EndpointFailed(FailureKind.REFUSED, "no answer")
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
    assert not servers.ejected, "nobody else answers either"
    servers.pool.close()


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
    assert len(servers.pool.endpoints[0].waiting) == 1
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not servers.pool.endpoints[0].waiting
    assert servers.pool.endpoints[0].failures == 0


# -- what the client saw --------------------------------------------------------------------------


class PoolClock:
    """The pool's, which moves as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PoolClock:
    made = PoolClock()
    monkeypatch.setattr(pool, "time", made)
    monkeypatch.setattr(pool, "WATCH_SECONDS", 0.0)
    return made


class TimedServers(Servers):
    """An answer takes as long as ``slow`` says on ``clock``; a hung endpoint, as the client waits:
    then its deadline has passed, or it ``hangs_up``."""

    def __init__(self, clock: PoolClock, waits: float = 0.02, hangs_up: bool = False) -> None:
        super().__init__()
        self.clock, self.waits, self.hangs_up = clock, waits, hangs_up

    async def attempt(self, endpoint: Endpoint, limit: Deadline) -> str:
        self.asked.append(endpoint.address)
        await asyncio.sleep(0.0)  # the pool may look
        took = self.slow.get(endpoint.address, 0.001)
        if endpoint.address in self.hangs or (self.waits and took > self.waits):
            self.clock.now += self.waits
            if self.hangs_up:
                raise asyncio.CancelledError
            raise TimedOut
        self.clock.now += took
        return endpoint.address

    async def gave_up(self, requests: int) -> int:
        """Send ``requests`` and count those without an answer."""
        count = 0
        for _ in range(requests):
            try:
                await self.pool.call(self.attempt, NO_DEADLINE, ())
            except (TimedOut, asyncio.CancelledError):
                count += 1
        self.pool.close()
        return count


async def test_a_hung_endpoint_is_ejected_whatever_deadline_the_clients_have(
    clock: PoolClock,
) -> None:
    servers = TimedServers(clock)
    servers.hangs.add("a")
    assert await servers.gave_up(50) == 3
    assert servers.ejected == {"a"}


async def test_clients_that_hang_up_say_what_those_with_a_deadline_say(clock: PoolClock) -> None:
    servers = TimedServers(clock, waits=1.0, hangs_up=True)
    servers.hangs.add("a")
    assert await servers.gave_up(50) == 3
    assert servers.ejected == {"a"}


async def test_deadlines_that_the_others_hardly_meet_either_eject_nobody(clock: PoolClock) -> None:
    servers = TimedServers(clock, waits=0.02)
    servers.slow = {"a": 0.021, "b": 0.015}
    assert await servers.gave_up(50) == 25
    assert not servers.ejected


async def test_requests_at_an_endpoint_that_answers_no_probe_are_answered_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "STALL_SECONDS", 0.02)
    monkeypatch.setattr(pool, "WATCH_SECONDS", 0.01)
    servers = Servers(timeout=60)
    servers.hangs.add("a")
    servers.dead.add("a")
    assert await asyncio.gather(*(servers.ask() for _ in range(20))) == ["b"] * 20
    assert servers.ejected == {"a"}
    assert "a" in servers.asked
    assert not servers.pool.endpoints[0].waiting
    servers.pool.close()


@pytest.mark.parametrize(("asked", "ejected"), [(20, {"a"}), (4, set())])
async def test_inferences_that_hang_are_answered_elsewhere_though_probes_are_answered(
    asked: int, ejected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "STALL_SECONDS", 0.02)
    monkeypatch.setattr(pool, "WATCH_SECONDS", 0.01)
    servers = Servers(timeout=2.0)
    servers.pool.endpoints[1].latency_seconds = 0.001
    servers.slow = {"b": 0.001}
    servers.hangs.add("a")
    limit = Deadline.after(0.6)
    answers = await asyncio.gather(
        *(servers.ask(limit) for _ in range(asked)), return_exceptions=True
    )
    assert servers.ejected == ejected, "two may be large requests"
    assert sum(isinstance(each, TimedOut) for each in answers) == (0 if ejected else 2)
    servers.pool.close()


async def test_the_last_endpoint_is_not_ejected_for_a_probe_that_had_little_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = Servers("ab")
    servers.dead.add("b")
    servers.pool.endpoints[0].ejected = True
    await servers.pool._decide(servers.pool.endpoints[1], 0.01)
    assert servers.ejected == {"a"}
    await servers.pool._decide(servers.pool.endpoints[1], 0.2)
    assert servers.ejected == {"a", "b"}
    servers.pool.close()


async def test_an_endpoint_that_takes_long_and_answers_probes_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "STALL_SECONDS", 0.02)
    monkeypatch.setattr(pool, "WATCH_SECONDS", 0.01)
    servers = Servers(timeout=60)
    servers.slow = {"a": 0.1, "b": 0.1}
    assert sorted(await asyncio.gather(*(servers.ask() for _ in range(4)))) == list("aabb")
    assert servers.probed
    assert not servers.ejected
    servers.pool.close()


async def test_a_hung_endpoint_is_asked_on_and_on_without_outlier_detection(
    clock: PoolClock,
) -> None:
    servers = TimedServers(clock)
    servers.pool._settings = OutlierDetection(enabled=False)
    servers.hangs.add("a")
    assert await servers.gave_up(50) == 25


@pytest.mark.parametrize(("slow", "ejected"), [(0.12, {"a"}), (0.1, set())])
async def test_an_endpoint_much_slower_than_the_others_is_ejected(
    clock: PoolClock, slow: float, ejected: set[str]
) -> None:
    servers = TimedServers(clock, waits=0)
    servers.slow = {"a": slow, "b": 0.001}
    await servers.gave_up(50)
    assert servers.ejected == ejected


# -- errors and full queues -----------------------------------------------------------------------


async def test_a_server_error_is_retried_elsewhere_and_the_endpoint_ejected_after_five() -> None:
    servers = Servers()
    servers.wrong["a"] = ServerError("broken")
    assert [await servers.ask() for _ in range(20)] == ["b"] * 20
    assert servers.asked.count("a") == 5
    servers.pool.close()


async def test_a_request_that_fails_everywhere_gets_the_error_and_ejects_no_endpoint() -> None:
    servers = Servers()
    servers.wrong = {"a": ServerError("poison"), "b": ServerError("poison")}
    for _ in range(20):
        with pytest.raises(Internal, match=r"^poison$"):
            await servers.ask()
    assert not servers.ejected
    assert len(servers.asked) == 40


async def test_a_full_queue_is_tried_elsewhere_and_full_everywhere_is_full() -> None:
    servers = Servers()
    servers.wrong["a"] = QueueFull()
    assert [await servers.ask() for _ in range(18)] == ["b"] * 18
    assert not servers.ejected, "it may be empty again soon"
    assert [await servers.ask() for _ in range(30)] == ["b"] * 30
    assert servers.ejected == {"a"}, "the others have room"
    servers.pool.close()
    servers = Servers()
    servers.wrong = {"a": QueueFull(), "b": QueueFull()}
    for _ in range(50):
        with pytest.raises(QueueFull):
            await servers.ask()
    assert not servers.ejected
    servers.pool.close()


@pytest.mark.parametrize(
    ("good", "most", "settings"),
    [
        (0, 21, DEFAULT),
        (10_000, 100, DEFAULT),  # the last requests tell, however many were good before
        (10_000, 2000, DEFAULT._replace(failure_percentage_request_volume=1000)),
    ],
)
async def test_an_endpoint_that_fails_now_and_then_is_ejected_for_its_success_rate(
    good: int, most: int, settings: OutlierDetection
) -> None:
    servers, asked = Servers(settings=settings), 0
    for _ in range(2 * good):
        await servers.ask()

    async def attempt(endpoint: Endpoint, limit: Deadline) -> str:
        nonlocal asked
        if endpoint.address == "a":
            asked += 1
            if asked % 2:
                raise ServerError("now and then")
        return endpoint.address

    for _ in range(4 * most):
        with contextlib.suppress(ServerError):  # the retries are spent
            await servers.pool.call(attempt, NO_DEADLINE)
    assert servers.ejected == {"a"}
    assert asked <= most
    servers.pool.close()


@pytest.mark.parametrize(
    ("error", "again"),
    [(ServerError("x"), 0), (EndpointFailed(FailureKind.DROPPED), 0), (QueueFull(), 1)],
)
async def test_a_step_of_a_sequence_is_not_taken_twice(error: Exception, again: int) -> None:
    servers = Servers()
    servers.wrong = {"a": error, "b": error}
    with pytest.raises((Internal, Unavailable)):
        await servers.pool.call(servers.attempt, NO_DEADLINE, NOT_PROCESSED)
    assert len(servers.asked) == 1 + again


async def test_an_endpoint_that_comes_back_and_fails_again_is_ejected_at_once_and_longer() -> None:
    servers = Servers(settings=QUICK)
    servers.wrong["a"] = ServerError("broken")
    probe, servers.probe = servers.probe, lambda _: asyncio.sleep(0)  # type: ignore[method-assign]
    servers.pool._probe = servers.probe
    for _ in range(10):
        await servers.ask()
    assert servers.asked.count("a") == 5
    for ejections in (2, 3):
        await until(lambda: not servers.ejected)
        asked = servers.asked.count("a")
        assert [await servers.ask() for _ in range(4)] == ["b"] * 4
        assert servers.asked.count("a") == asked + 1
        assert servers.pool.endpoints[0].ejections == ejections
    servers.pool.close()
    assert probe


@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError()])
async def test_no_exception_of_a_probe_keeps_an_endpoint_away(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "RESTART_SECONDS", 0.01)
    servers, raised = Servers(settings=QUICK), 0

    async def probe(endpoint: Endpoint) -> None:
        nonlocal raised
        raised += 1
        if raised < 3:
            raise error

    def reset(endpoint: Endpoint) -> None:
        if raised < 2:
            raise error

    servers.pool._probe, servers.pool._reset = probe, reset
    servers.wrong["a"] = refused()
    await servers.ask()
    await servers.ask()
    assert servers.ejected == {"a"}
    raised = 2
    await until(lambda: not servers.ejected)
    servers.pool.close()


async def amplification(requests: int) -> float:
    """Attempts for each request, where every second attempt fails."""
    servers, attempts = Servers("abc"), 0

    async def attempt(endpoint: Endpoint, limit: Deadline) -> str:
        nonlocal attempts
        attempts += 1
        if attempts % 2:
            raise EndpointFailed(FailureKind.DAMAGED)
        return "fine"

    for _ in range(requests):
        with contextlib.suppress(Internal):
            await servers.pool.call(attempt, NO_DEADLINE)
    servers.pool.close()
    return attempts / requests


async def test_retries_stay_within_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await amplification(1000) <= 1.2
    monkeypatch.setattr(retries, "EARNED_PER_REQUEST", 1.0)  # as if unlimited
    assert await amplification(1000) > 1.2


# -- words ----------------------------------------------------------------------------------------


def test_what_another_server_says_is_cleaned_of_folders_addresses_and_traces() -> None:
    said = "in ensemble, failed to open '/opt/models/x/1/model.py' at 10.0.0.5:8001\nAt:\n  File"
    assert public(said) == "in ensemble, failed to open 'model.py' at the server"
    assert public("ipv4:127.0.0.1:80: broken") == "the server: broken"
    assert public("expected [1], got [16] and [::1]:80 [fe80::1%eth0]:9") == (
        "expected [1], got [16] and the server the server"
    )
    assert public("shape [1,4] / 3.5 and/or 1/2") == "shape [1,4] / 3.5 and/or 1/2"


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        ("INVALID_ARGUMENT", "x", InvalidArgument),
        ("UNAVAILABLE", "[request id: 1] Exceeds maximum queue size", QueueFull),
        ("UNAVAILABLE", "Request timeout expired", TimedOut),
        ("RESOURCE_EXHAUSTED", "", QueueFull),
        ("DEADLINE_EXCEEDED", "", TimedOut),
        ("UNKNOWN", "", ServerError),
        ("INTERNAL", "", ServerError),
        ("PERMISSION_DENIED", "", Internal),
    ],
)
def test_statuses_keep_their_meaning(status: str, said: str, kind: type[Exception]) -> None:
    assert type(meant(status, said)) is kind


@pytest.mark.parametrize(
    ("status", "failure"),
    [("NOT_FOUND", FailureKind.MISSING), ("UNAVAILABLE", FailureKind.UNREADY)],
)
def test_a_server_without_the_model_is_its_own_fault(status: str, failure: FailureKind) -> None:
    error = meant(status, "no")
    assert isinstance(error, EndpointFailed)
    assert error.failure is failure
