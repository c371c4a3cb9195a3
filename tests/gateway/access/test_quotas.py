"""Quotas, over one process and several that share the ledger."""

from __future__ import annotations

import dataclasses
import fcntl
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from modelport.gateway.access import quota_ledger
from modelport.gateway.access.principal import Principal
from modelport.gateway.access.quota_ledger import QuotaLedger
from modelport.gateway.access.quotas import Quota, QuotaAccount, Quotas
from modelport.gateway.errors import QuotaExceeded

#: Requests that processes compete for.
BURST = 40_000
CI, BATCH = Principal("ci"), Principal("batch")


def matches(names: Sequence[str], principal: Principal) -> bool:
    return principal.name in names


class QuotaClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> QuotaClock:
    return QuotaClock()


def quotas(clock: QuotaClock, *rows: Quota, ledger: QuotaLedger | None = None) -> Quotas:
    return Quotas(rows, ledger or QuotaLedger(), matches, clock)


def account_of(found: Quotas, principal: Principal = CI, model: str = "fraud") -> QuotaAccount:
    account = found.account(principal, model)
    assert account is not None
    return account


def admits(found: Quotas, account: QuotaAccount, size_bytes: int = 0) -> bool:
    try:
        row = found.enter(account, size_bytes)
    except QuotaExceeded:
        return False
    found.leave(row)
    return True


def test_the_burst_is_admitted_and_then_the_rate(clock: QuotaClock) -> None:
    found = quotas(clock, Quota(("ci",), requests_per_second=10, burst=5))
    account = account_of(found)
    assert [admits(found, account) for _ in range(7)] == [True] * 5 + [False] * 2
    clock.now += 0.1
    assert [admits(found, account) for _ in range(2)] == [True, False]
    clock.now += 60.0
    assert [admits(found, account) for _ in range(6)] == [True] * 5 + [False]


def test_no_schedule_admits_more_than_the_rate_and_the_burst(clock: QuotaClock) -> None:
    randomness = random.Random(1)
    for _ in range(50):
        rate, burst = randomness.uniform(0.5, 500), randomness.randint(1, 50)
        found = quotas(clock, Quota(("ci",), requests_per_second=rate, burst=burst))
        account, began, admitted = account_of(found), clock.now, 0
        for _ in range(400):
            clock.now += randomness.expovariate(rate * 3)
            admitted += admits(found, account)
        elapsed = clock.now - began
        assert admitted <= elapsed * rate + burst + 1e-6
        assert admitted >= min(400, elapsed * rate * 0.6)


def test_a_refusal_says_when_to_come_again(clock: QuotaClock) -> None:
    found = quotas(clock, Quota(("ci",), requests_per_second=0.5, burst=1))
    account = account_of(found)
    assert admits(found, account)
    with pytest.raises(QuotaExceeded, match=r"more than 0\.5 requests per second") as refused:
        found.enter(account, 0)
    assert refused.value.retry_after_seconds == pytest.approx(2.0)
    clock.now += refused.value.retry_after_seconds
    assert admits(found, account)


def test_bytes_are_charged_after_the_request_that_brings_them(clock: QuotaClock) -> None:
    found = quotas(clock, Quota(("ci",), bytes_per_second=1000))
    account = account_of(found)
    assert admits(found, account, 5000)
    assert not admits(found, account, 1)
    clock.now += 3.9
    assert not admits(found, account, 1)
    clock.now += 0.2
    assert admits(found, account, 1)


def test_tokens_are_estimated_at_first_and_charged_as_they_are_counted(clock: QuotaClock) -> None:
    found = quotas(clock, Quota(("ci",), tokens_per_second=100))
    account = account_of(found)
    row = found.enter(account, 0, 250)
    with pytest.raises(QuotaExceeded, match="more than 100 tokens per second") as refused:
        found.enter(account, 0, 1)
    assert (refused.value.unit, refused.value.retry_after_seconds) == ("tokens", 1.5)
    found.correct(account, row, -200)  # it was half a second's
    found.leave(row)
    row = found.enter(account, 0, 1)
    found.correct(account, row, 499)
    found.leave(row)
    clock.now += 4.4
    assert not admits(found, account)
    clock.now += 0.2
    assert admits(found, account)


def test_a_correction_fills_no_bucket_beyond_its_brim(clock: QuotaClock) -> None:
    found = quotas(clock, Quota(("ci",), tokens_per_second=100))
    account = account_of(found)
    row = found.enter(account, 0, 50)
    clock.now += 100
    found.correct(account, row, -50)
    assert admits(found, account)
    found.enter(account, 0, 201)
    assert not admits(found, account)


def test_requests_in_flight_are_bounded(clock: QuotaClock) -> None:
    found = quotas(clock, Quota(("ci",), in_flight=2))
    account = account_of(found)
    rows = [found.enter(account, 0), found.enter(account, 0)]
    with pytest.raises(QuotaExceeded, match="more than 2 requests in flight"):
        found.enter(account, 0)
    found.leave(rows[0])
    assert admits(found, account)


def test_all_credentials_of_a_caller_share_its_quota(clock: QuotaClock) -> None:
    found = quotas(clock, Quota(("ci",), requests_per_second=1, burst=5, in_flight=2))
    accounts = [account_of(found, Principal("ci", fingerprint=f"{n}")) for n in range(9)]
    assert len({id(account) for account in accounts}) == 9
    rows = [found.enter(account, 0) for account in accounts[:2]]
    for account in accounts:
        with pytest.raises(QuotaExceeded, match="more than 2 requests in flight"):
            found.enter(account, 0)
    for row in rows:
        found.leave(row)
    assert [admits(found, account) for account in accounts].count(True) == 3


def test_callers_of_one_name_have_the_quotas_of_their_own_groups(clock: QuotaClock) -> None:
    def by_group(names: Sequence[str], principal: Principal) -> bool:
        return bool(principal.groups.intersection(names))

    rows = [Quota(("slow",), in_flight=1), Quota(("fast",), in_flight=9)]
    found = Quotas(rows, QuotaLedger(), by_group, clock)
    for _ in range(2):
        for group, quota in (("slow", rows[0]), ("fast", rows[1])):
            account = account_of(found, Principal("ci", groups=frozenset({group})))
            assert account.quota is quota


def test_other_quotas_hold_at_once_while_requests_in_flight_count(clock: QuotaClock) -> None:
    found = quotas(clock, Quota(("ci",), in_flight=1))
    row = found.enter(account_of(found), 0)
    found.replace([Quota(("ci",), in_flight=2)], matches)
    other = found.enter(account_of(found), 0)
    assert not admits(found, account_of(found))
    found.replace([Quota(("batch",), in_flight=1)], matches)
    assert found.account(CI, "fraud") is None
    found.leave(row)
    found.leave(other)
    found.replace([Quota(("ci",), in_flight=1)], matches)
    assert admits(found, account_of(found))


def test_the_first_quota_that_matches_holds_and_each_pair_has_its_own_bucket(
    clock: QuotaClock,
) -> None:
    found = quotas(
        clock,
        Quota(("ci",), ("fraud*",), requests_per_second=1, burst=1),
        Quota(("ci", "batch"), requests_per_second=1, burst=3),
    )
    assert admits(found, account_of(found, CI, "fraud"))
    assert not admits(found, account_of(found, CI, "fraud"))
    assert admits(found, account_of(found, CI, "fraud-2"))
    assert [admits(found, account_of(found, BATCH, "fraud")) for _ in range(4)].count(True) == 3
    assert found.account(Principal("alice"), "fraud") is None


def test_replies_tell_what_is_left(clock: QuotaClock) -> None:
    quota = Quota(("ci",), requests_per_second=10, burst=20, in_flight=4, bytes_per_second=1e6)
    quota = dataclasses.replace(quota, tokens_per_second=5000)
    found = quotas(clock, quota)
    account = account_of(found)
    for _ in range(5):
        assert admits(found, account)
    headers = dict(found.headers(account))
    assert headers[b"ratelimit"] == b'"requests";r=15;t=1'
    assert headers[b"ratelimit-policy"] == (
        b'"requests";q=20;w=2, "bytes";q=1000000;qu="content-bytes";w=1, '
        b'"tokens";q=5000;qu="tokens";w=1, '
        b'"in-flight";q=4;qu="concurrent-requests"'
    )


# -- the ledger -----------------------------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[int]:
    descriptor = QuotaLedger.share(4)
    yield descriptor
    os.close(descriptor)


def test_requests_in_flight_count_over_all_processes_and_not_those_of_a_killed_one(
    clock: QuotaClock, shared: int
) -> None:
    rows = [Quota(("ci",), in_flight=3)]
    workers = [quotas(clock, *rows, ledger=QuotaLedger(4, n, shared)) for n in range(4)]
    for worker in workers[:3]:
        row = worker.enter(account_of(worker), 0)
    assert not admits(workers[3], account_of(workers[3]))
    replacement = quotas(clock, *rows, ledger=QuotaLedger(4, 1, shared))
    assert admits(replacement, account_of(replacement))
    workers[0].leave(row)
    assert admits(workers[3], account_of(workers[3]))


def test_a_row_that_holds_nothing_is_used_again(
    clock: QuotaClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_ledger, "ROWS", 8)
    found = quotas(clock, Quota(tuple(f"p{n}" for n in range(99)), requests_per_second=1, burst=1))
    for number in range(8):
        assert admits(found, account_of(found, Principal(f"p{number}")))
    with pytest.raises(QuotaExceeded, match="too many callers"):
        found.enter(account_of(found, Principal("p8")), 0)
    clock.now += 2.0
    assert admits(found, account_of(found, Principal("p8")))
    assert admits(found, account_of(found, Principal("p0"))), "an account whose row is gone"


def test_keys_differ_and_none_is_that_of_an_empty_row() -> None:
    ledger = QuotaLedger()
    keys = {ledger.key(f"p{n}", f"m{n % 7}") for n in range(1000)}
    assert len(keys) == 1000
    assert ledger.key("a", "b") != ledger.key("ab", "")
    assert all(first for first, _ in keys)


def test_the_places_of_rows_differ_between_gateways_and_not_between_their_processes(
    shared: int,
) -> None:
    first, second, other = QuotaLedger(4, 0, shared), QuotaLedger(4, 1, shared), QuotaLedger()
    assert first.key("ci", "fraud") == second.key("ci", "fraud") != other.key("ci", "fraud")


def test_a_row_that_another_process_takes_before_it_is_locked_is_not_charged(
    clock: QuotaClock, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_ledger, "ROWS", 8)
    rows = [Quota(("ci", "batch"), in_flight=1)]
    ours, theirs = (quotas(clock, *rows, ledger=QuotaLedger(4, n, shared)) for n in range(2))
    account, find = account_of(ours), ours._ledger.row
    taken_rows: list[int] = []

    def taken(key: tuple[int, int], now: float) -> int | None:
        """Find a row, which the other process then takes for another caller."""
        monkeypatch.setattr(ours._ledger, "row", find)
        row = find(key, now)
        assert row is not None
        other = account_of(theirs, BATCH)
        theirs._ledger._counts[row], theirs._ledger._counts[row + 1] = other.key
        other.row = row
        taken_rows.append(theirs.enter(other, 0))
        return row

    monkeypatch.setattr(ours._ledger, "row", taken)
    row = ours.enter(account, 0)
    assert ours._ledger.belongs(row, account.key)
    assert row not in taken_rows
    assert not admits(theirs, account_of(theirs))
    ours.leave(row)
    theirs.leave(taken_rows[0])
    assert admits(theirs, account_of(theirs))
    assert admits(theirs, account_of(theirs, BATCH))


def _spend(queue: Any, descriptor: int, number: int) -> None:
    """Spend what there is, while time stands still."""
    rows = [Quota(("ci",), requests_per_second=1, burst=BURST)]
    found = Quotas(rows, QuotaLedger(4, number, descriptor), matches, QuotaClock())
    account, admitted = account_of(found), 0
    while admits(found, account):
        admitted += 1
    queue.put(admitted)


def test_processes_that_compete_admit_the_quota_within_a_tenth(shared: int) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    children = [
        context.Process(target=_spend, args=(results, shared, number)) for number in range(4)
    ]
    for child in children:
        child.start()
    admitted = [results.get() for _ in children]
    for child in children:
        child.join()
    assert BURST <= sum(admitted) <= 1.1 * BURST


def _hold(pipe: Any, descriptor: int) -> None:
    """Hold the locks of all rows until the end of this process."""
    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    pipe.send(True)
    signal.pause()


def test_a_process_that_is_stopped_or_killed_with_its_locks_stops_nobody(shared: int) -> None:
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    child = context.Process(target=_hold, args=(theirs, shared))
    child.start()
    assert pipe.recv()
    with pytest.raises(BlockingIOError):
        fcntl.lockf(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
    rows = [Quota(("ci",), requests_per_second=1, burst=2)]
    found = Quotas(rows, QuotaLedger(4, 0, shared), matches, QuotaClock())
    account = account_of(found)
    assert [admits(found, account) for _ in range(3)] == [True, True, False]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    fcntl.lockf(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not admits(found, account)
