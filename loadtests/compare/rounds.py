"""One round of one candidate: a fresh server, its cold start, the loads, the search for a rate."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol as Structural

from modelport.loadtests.compare.measured_candidate import MeasuredCandidate, check, evaluate
from modelport.loadtests.compare.plan import protocol_for
from modelport.loadtests.compare.result import Measured
from modelport.loadtests.load.percentiles import curve, histogram
from modelport.loadtests.load.run import NotMeasured, Unwritten
from modelport.loadtests.load.samples import LoadProfile, LoadRun
from modelport.loadtests.load.summary import Summary, latencies, summarise
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.serving.server import ReadyServer, served
from modelport.loadtests.system.environments import Missing
from modelport.loadtests.system.processes import ServerFailed

#: Largest share of failed requests in a closed loop, or at a rate that counts.
MAX_ERROR_SHARE = 0.001
#: A rate counts only if load generator and server reached this share of it.
MIN_SHARE_OF_RATE = 0.95
#: Most requests in flight in an open loop.
OPEN_LOOP_USERS = 128
#: Free space needed for a server's log and a run's samples.
LEAST_FREE_BYTES = 1 << 20
#: Time limit of the first correct answer.
FIRST_RESPONSE_SECONDS = 60.0


class Measure(Structural):
    """The signature of ``modelport.loadtests.load.run.measure``."""

    def __call__(
        self,
        target: LoadTestTarget,
        load: LoadProfile,
        payloads: Path | None = None,
        *,
        core: int | None = None,
    ) -> LoadRun: ...


#: First rate tried, as a share of the closed loop's: below the knee for most servers.
FIRST_SHARE = 0.75
#: Factors between rates while none has failed, or none has passed.
GROWTH, SHRINK = 1.3, 0.5


@dataclass(frozen=True)
class RoundSettings:
    """The loads of one candidate in one round.

    Attributes:
        protocols: requested protocols; the search uses the first.
        rates: of further open loops, requests per second.
        probes: number of rates that the search tries.
        server_cores, client_core: empty and None: any core.
    """

    protocols: tuple[LoadTestProtocol, ...] = (LoadTestProtocol.OIP_HTTP,)
    users: tuple[int, ...] = (1, 16)
    rates: tuple[float, ...] = ()
    duration_seconds: float = 1.2
    warmup_seconds: float = 0.3
    probes: int = 3
    slo_p99_ms: float = 20.0
    seed: int = 0
    server_cores: tuple[int, ...] = ()
    client_core: int | None = None

    @property
    def loads(self) -> int:
        """The number of loads on one candidate in one round."""
        return len(self.protocols) * (len(self.users) + len(self.rates)) + self.probes


class Died(Exception):
    """The server ended under measurement."""


#: Failures of the candidate; any other ``OSError`` is this machine's, such as a full disk.
FAILURES = (ServerFailed, Missing, NotMeasured, Died, ConnectionError, TimeoutError)


class CandidateRound:
    """One candidate in one round; results go into the contender at once."""

    def __init__(
        self,
        contender: MeasuredCandidate,
        number: int,
        settings: RoundSettings,
        measure: Measure,
        tell: Callable[[str], None],
    ) -> None:
        self.contender = contender
        self.number = number
        self.settings = settings
        self.measure = measure
        self.tell = tell
        self.notes: list[str] = []

    def run(self, work: Path) -> list[str]:
        """Measure; return remarks for the report. A failure disqualifies and raises no error."""
        contender = self.contender
        try:
            self.tell("starting")
            with fresh(contender, self.settings, work) as server:
                contender.cold_start_seconds.append(server.cold_start_seconds)
                first = server.first_response(
                    contender.payloads, within_seconds=FIRST_RESPONSE_SECONDS
                )
                contender.cold_first_response_seconds.append(first)
                self._load(server)
                contender.memory_bytes.append(server.memory_bytes())
        except FAILURES as error:
            check_room(work)
            contender.disqualify(f"round {self.number + 1}: {first_line(error)}")
        return self.notes

    def _load(self, server: ReadyServer) -> None:
        """Run closed loops with few and many users, open loops at the rates, and the search."""
        spoken = [protocol_for(wanted, server.targets) for wanted in self.settings.protocols]
        capacity = 0.0
        for protocol in dict.fromkeys(filter(None, spoken)):
            for users in self.settings.users:
                found = self._measured(server, protocol, self._closed(users))
                if not capacity or protocol is spoken[0]:
                    capacity = max(capacity, found.requests_per_second)
            for rate in self.settings.rates:
                self._measured(server, protocol, self._open(rate))
        if spoken[0] is not None and capacity > 0 and self.settings.probes:
            self._search(server, spoken[0], capacity)

    def _closed(self, users: int) -> LoadProfile:
        settings = self.settings
        return LoadProfile(
            users=users,
            duration_seconds=settings.duration_seconds,
            warmup_seconds=settings.warmup_seconds,
            seed=settings.seed + self.number,
        )

    def _open(self, rate: float) -> LoadProfile:
        settings = self.settings
        return LoadProfile(
            users=OPEN_LOOP_USERS,
            rate=rate,
            duration_seconds=settings.duration_seconds,
            warmup_seconds=settings.warmup_seconds,
            seed=settings.seed + self.number,
        )

    def _search(self, server: ReadyServer, protocol: LoadTestProtocol, capacity: float) -> None:
        def passes(rate: float) -> bool:
            found = self._measured(server, protocol, self._open(rate))
            errors = found.wrong + found.refused + found.failed
            return (
                found.requests > 0
                and found.latency.p99 <= self.settings.slo_p99_ms
                and errors <= MAX_ERROR_SHARE * found.requests
                and found.requests_per_second >= MIN_SHARE_OF_RATE * rate
            )

        self.contender.rate_under_slo.append(highest_rate(passes, capacity, self.settings.probes))

    def _measured(
        self, server: ReadyServer, protocol: LoadTestProtocol, load: LoadProfile
    ) -> Measured:
        """Run one load, and record its figures and any reason to disqualify."""
        how = f"{load.users} in flight" if load.rate is None else f"{load.rate:,.0f}/s"
        self.tell(f"{protocol}, {how}")
        before = server.cpu_seconds()
        try:
            run = self.measure(
                server.targets[protocol],
                load,
                self.contender.requests,
                core=self.settings.client_core,
            )
        except Unwritten as error:
            raise OSError(str(error)) from error
        if not server.alive:
            raise Died(f"its server exited with {server.process.returncode} under {how}")
        summary = summarise(run)
        found = measured(self.number, run, summary, server.cpu_seconds() - before)
        self.contender.runs.append(found)
        self._judge(found, how)
        if load.rate is None and load.users == max(self.settings.users) and summary.requests:
            self._count_cpu(run, found)
        return found

    def _count_cpu(self, run: LoadRun, found: Measured) -> None:
        """Add CPU time per request; the warm-up's requests, absent from the samples, count too."""
        load = run.load
        counted = load.duration_seconds / (load.duration_seconds + load.warmup_seconds)
        seconds = found.server_cpu_seconds * counted / found.requests
        self.contender.cpu_seconds_per_request.append(seconds)
        if run.saturated:
            self.notes.append(
                f"{self.contender.name}: the load generator was at the limit of its core with "
                f"{load.users} in flight; the server may be faster than measured"
            )

    def _judge(self, found: Measured, how: str) -> None:
        contender = self.contender
        if found.wrong:
            contender.disqualify(
                f"{found.wrong:,} of {found.requests:,} answers were wrong under {how}"
                f"{_most_frequent(found)}"
            )
        if not found.requests:
            seconds = self.settings.duration_seconds
            self.notes.append(
                f"{contender.name}: no request began and ended within {seconds:g} s under {how}; "
                "give a longer --duration"
            )
        # A rate above capacity may be refused; a closed loop waits for each answer.
        bad = found.refused + found.failed
        if found.loop == "closed" and bad > MAX_ERROR_SHARE * found.requests:
            contender.disqualify(
                f"{bad:,} of {found.requests:,} requests failed under {how}{_most_frequent(found)}"
            )


def measured(number: int, run: LoadRun, summary: Summary, server_cpu_seconds: float) -> Measured:
    """The figures of a run; requests that timed out count as failed."""
    load = run.load
    return Measured(
        round=number,
        protocol=str(run.target.protocol),
        loop="closed" if load.rate is None else "open",
        users=load.users,
        rate=load.rate,
        requests=summary.requests,
        requests_per_second=summary.requests_per_second,
        latency=summary.latency,
        first_byte=summary.first_byte,
        wrong=summary.wrong,
        refused=summary.refused,
        failed=summary.failed + summary.timed_out,
        errors=dict(summary.errors),
        server_cpu_seconds=server_cpu_seconds,
        curve=curve(histogram(latencies(run.samples))),
    )


def _most_frequent(found: Measured) -> str:
    errors = sorted(found.errors.items(), key=lambda item: -item[1])
    return f": {errors[0][0]}" if errors else ""


def first_line(error: BaseException) -> str:
    """The text of a server's log or an exception on one line, with its end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if len(lines) == 1 else f"{lines[0]} ({lines[-1]})"


@contextmanager
def fresh(
    contender: MeasuredCandidate, settings: RoundSettings, work: Path
) -> Iterator[ReadyServer]:
    """Start the candidate's server; start it again if a port was taken meanwhile."""
    with ExitStack() as stack:
        try:
            started = served(contender.backend, work, cores=settings.server_cores)
            server = stack.enter_context(started)
        except ServerFailed:
            shutil.rmtree(work)
            again = served(contender.backend, work, cores=settings.server_cores)
            server = stack.enter_context(again)
        yield server


def verify(contender: MeasuredCandidate, settings: RoundSettings, work: Path) -> None:
    """Start the server once without counting, and check every answer."""
    try:
        with fresh(contender, settings, work) as server:
            if problem := check(contender, server) or evaluate(contender, server):
                contender.disqualify(problem)
            elif not any(protocol_for(p, server.targets) for p in settings.protocols):
                asked: Sequence[str] = [str(protocol) for protocol in settings.protocols]
                contender.disqualify(f"it does not support {', '.join(asked)}")
    except FAILURES as error:
        check_room(work)
        contender.disqualify(first_line(error))


def check_room(work: Path) -> None:
    """Raise if the disk is full: that failure is not the candidate's.

    Raises:
        OSError: the disk is full.
    """
    if shutil.disk_usage(work.parent).free < LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work.parent))


def highest_rate(passes: Callable[[float], bool], capacity: float, probes: int) -> float | None:
    """Find the highest passing rate with ``probes`` trials by bisection; None if none passed.

    Rates grow until one fails, or shrink until one passes; then the geometric mean of the two is
    tried.

    Args:
        capacity: requests per second of a closed loop, above 0.
    """
    rate, passed, failed = FIRST_SHARE * capacity, None, None
    for _ in range(probes):
        if passes(rate):
            passed = rate
        else:
            failed = rate
        if passed is None:
            rate *= SHRINK
        elif failed is None:
            rate *= GROWTH
        else:
            rate = math.sqrt(passed * failed)
    return passed
