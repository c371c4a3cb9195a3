"""Paired rounds of a gate on real servers: both sides are restarted and measured in alternation.

Every round starts new processes, because processes of the same program differ (memory layout,
caches), and a longer load on one process would not show that. Within a round the sides alternate, A
B B A and in the next round B A A B, so that disturbances of the machine affect both alike:

- A single user without a rate alternates **request by request**, from one load generator. A burst
  of a neighbour lasts milliseconds to seconds and determines a p99. Both sides meet the same
  bursts, so their noise cancels in the ratio. Work that a server does after its answer can delay
  the other side's next request; half of the turns, the second of A A, are not affected.
- Several users, or a rate, keep a side busy all the time. There the sides alternate in **slices**
  of load of some seconds, because two servers under load at once would measure each other.

A server that is running already is only sent requests.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modelport.gateway.slo import Slo
from modelport.loadtests.gate import reference_answers
from modelport.loadtests.gate.baseline_and_candidate import Published, Side
from modelport.loadtests.gate.criteria import WRONG, PairedRound, SideMeasurements, half_of
from modelport.loadtests.gate.decision import BROKEN
from modelport.loadtests.load import payloads
from modelport.loadtests.load import run as running
from modelport.loadtests.load.run import NotMeasured
from modelport.loadtests.load.samples import LoadProfile, LoadRun
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.serving.gateway import MeasuredGateway
from modelport.loadtests.serving.server import AnswersWrongly, ReadyServer, served
from modelport.loadtests.system.environments import Missing
from modelport.loadtests.system.processes import ServerFailed

#: A baseline with more failures than this is not a reference.
MOST_BASELINE_ERRORS = 0.1
#: Seconds that a load takes besides its slices, to start and stop its generator.
LOAD_SECONDS = 3.0
#: Name of the question whether a candidate starts at all.
START = "start"
#: Minimum for a step that has begun when the time is over.
LEAST_SECONDS = 1.0
Say = Callable[[str], None]


class SideFailed(Exception):
    """A side can no longer be measured; the message names it and the reason."""

    def __init__(self, message: str, *, is_candidate: bool, name: str = BROKEN) -> None:
        super().__init__(message)
        self.is_candidate = is_candidate
        #: The name of the question that this answers.
        self.name = name


class OutOfTime(SideFailed):
    """The longest duration ended before a side was ready."""


@dataclass(frozen=True)
class Cores:
    """Cores for servers and load generator, kept apart."""

    server: tuple[int, ...] = ()
    client: int | None = None

    @classmethod
    def of_this_machine(cls) -> Cores:
        """The last core for the client if there are two or more; all others for the servers."""
        if not hasattr(os, "sched_getaffinity"):
            return cls()
        *server, client = sorted(os.sched_getaffinity(0))
        return cls(tuple(server), client) if server else cls()


@dataclass(frozen=True)
class LiveSide:
    """A side that answers requests."""

    target: LoadTestTarget
    server: ReadyServer | None
    first_response_seconds: float | None

    @property
    def cold_start_seconds(self) -> float | None:
        return None if self.server is None else self.server.cold_start_seconds


@dataclass
class PairedMeasurement:
    """Baseline and candidate, and their requests."""

    sides: tuple[Side, Side]
    protocol: LoadTestProtocol
    slo: Slo
    seed: int
    #: An empty folder for logs.
    work: Path
    cores: Cores
    say: Say
    #: End of the gate, as a time of ``time.monotonic()``.
    ends: float
    #: The same requests for each side, with its expected answers; None: not yet recorded.
    payloads: tuple[Path, Path] | None = None
    #: Whether the baseline is compared with its own first answers.
    expects_own_answers: bool = False
    #: Seconds of each side's last start, until it was ready.
    start_seconds: dict[int, float] = field(default_factory=dict)
    #: Number of starts; each has its own folder.
    _starts: int = 0

    @contextlib.contextmanager
    def live(self, number: int) -> Iterator[LiveSide]:
        """Run side ``number`` (0: baseline) inside the block.

        Raises:
            SideFailed: it is not ready in the remaining time, or answers wrongly.
        """
        side = self.sides[number]
        if not isinstance(side, Published):
            yield LiveSide(side.target(self.protocol), None, None)
            return
        self._starts += 1
        name = ("baseline", "candidate")[number]
        backend = MeasuredGateway(side.folder, side.version, ("--exit-on-error", "true"))
        within = max(LEAST_SECONDS, min(self.slo.duration.ready_seconds, self.left))
        with contextlib.ExitStack() as stack:
            try:
                server = stack.enter_context(
                    served(
                        backend,
                        self.work / f"{self._starts}-{name}",
                        cores=self.cores.server,
                        ready_seconds=within,
                    )
                )
                first = self._first_response(number, server, within)
            except AnswersWrongly as error:
                raise self._lost(number, f"answers wrongly: {error}", WRONG) from error
            except (ServerFailed, Missing) as error:
                if self.left <= 0:
                    raise self._out_of_time(name, within, error) from error
                raise self._lost(number, f"does not start: {_reason(error)}", START) from error
            self.start_seconds[number] = server.cold_start_seconds
            yield LiveSide(server.targets[self.protocol], server, first)

    @property
    def left(self) -> float:
        """Seconds until the gate must end."""
        return self.ends - time.monotonic()

    @property
    def round_seconds(self) -> float:
        """The minimum duration of the next round."""
        duration = self.slo.duration
        loads = 1 if self.slo.load.has_single_user else 2 * duration.slices
        loading = 2 * duration.slices * duration.slice_seconds
        started = sum(self.start_seconds.values())
        return started + loading + loads * (duration.warmup_seconds + LOAD_SECONDS)

    def _out_of_time(self, name: str, within: float, error: Exception) -> OutOfTime:
        most = self.slo.duration.max_seconds
        said = str(error).splitlines()[0]
        return OutOfTime(
            f"the {name} did not start in the {within:.0f} s that were left of --max-duration "
            f"{most:g}s ({said}); increase it",
            is_candidate=False,
        )

    def round(self, number: int) -> tuple[PairedRound, tuple[list[LoadRun], list[LoadRun]]]:
        """Measure both sides next to each other; return the figures and the runs.

        Raises:
            SideFailed: a side broke.
        """
        order = (0, 1) if number % 2 == 0 else (1, 0)
        with contextlib.ExitStack() as stack:
            live = {which: stack.enter_context(self.live(which)) for which in order}
            runs: tuple[list[LoadRun], list[LoadRun]] = ([], [])
            for which, run in self._runs(order, live, number):
                runs[which].append(run)
        baseline, candidate = (
            half_of(runs[which], live[which].cold_start_seconds, live[which].first_response_seconds)
            for which in (0, 1)
        )
        self._check_baseline(baseline, runs[0])
        return PairedRound(baseline, candidate), runs

    def _runs(
        self, order: tuple[int, int], live: Mapping[int, LiveSide], number: int
    ) -> Iterator[tuple[int, LoadRun]]:
        """Yield (side, run) of one round in alternation; each side has the same seconds of load."""
        slices = 2 * self.slo.duration.slices
        if self.slo.load.has_single_user:
            self.say(f"round {number + 1}: both sides in turn")
            with contextlib.suppress(NotMeasured):  # measured alone, a side reports its own problem
                yield from self._together(order, live, self._load(number, slices))
                return
        for slice_ in range(slices):
            which = order[(slice_ + 1) // 2 % 2]
            self.say(f"round {number + 1}: {('baseline', 'candidate')[which]}")
            yield which, self._slice(which, live[which], self._load(number))

    def _load(self, number: int, slices: int = 1) -> LoadProfile:
        traffic, duration = self.slo.load, self.slo.duration
        return LoadProfile(
            users=traffic.users,
            rate=traffic.rate_per_second,
            duration_seconds=slices * duration.slice_seconds,
            warmup_seconds=duration.warmup_seconds,
            batch_size=traffic.batch_size,
            seed=self.seed + number,
            timeout_seconds=max(LEAST_SECONDS, min(traffic.timeout_seconds, self.left)),
        )

    def _together(
        self, order: tuple[int, int], live: Mapping[int, LiveSide], load: LoadProfile
    ) -> list[tuple[int, LoadRun]]:
        """Load both sides in one run; raise ``SideFailed`` or ``NotMeasured``."""
        assert self.payloads is not None
        data = [self.payloads[which] for which in order]
        targets = [(live[which].target, 1) for which in order]
        made = running.measure_mix(targets, load, data, core=self.cores.client)
        for which in order:
            self._check_alive(which, live[which])
        return list(zip(order, made, strict=True))

    def _slice(self, which: int, live: LiveSide, load: LoadProfile) -> LoadRun:
        assert self.payloads is not None
        try:
            run = running.measure(live.target, load, self.payloads[which], core=self.cores.client)
        except NotMeasured as error:
            self._check_alive(which, live)
            if self._answers(which, live):  # not the side's failure
                raise SideFailed(f"no load: {_reason(error)}", is_candidate=False) from error
            raise self._lost(which, f"cannot be measured: {_reason(error)}") from error
        self._check_alive(which, live)
        return run

    def _answers(self, which: int, live: LiveSide) -> bool:
        assert self.payloads is not None
        asked = payloads.read(self.payloads[which])
        return reference_answers.responds(asked, live.target, self.slo.load.timeout_seconds)

    def _check_alive(self, which: int, live: LiveSide) -> None:
        if live.server is not None and not live.server.alive:
            status = live.server.process.returncode
            raise self._lost(which, f"exited under load, with status {status}")

    def _first_response(self, which: int, server: ReadyServer, within: float) -> float | None:
        """Process start to first correct answer; None in the preflight, which records the
        answers."""
        if self.payloads is None:
            return None
        return server.first_response(payloads.read(self.payloads[which]), within_seconds=within)

    def _check_baseline(self, half: SideMeasurements, runs: list[LoadRun]) -> None:
        said = next((message for run in runs for message in run.errors), "no response")
        if not half.asked or half.errors > MOST_BASELINE_ERRORS * half.asked:
            raise self._lost(0, f"fails {half.errors} of {half.asked} requests: {said}")
        allowed = self.slo.limits.max_wrong_share
        if self.expects_own_answers and allowed is not None and half.wrong > allowed * half.asked:
            raise self._lost(
                0,
                f"changed its answers to {half.wrong} of {half.asked} requests ({said}): give "
                "expected answers with --data, or a larger tolerance in [answers]",
            )

    def _lost(self, which: int, why: str, name: str = BROKEN) -> SideFailed:
        side = ("baseline", "candidate")[which]
        return SideFailed(
            f"the {side} {why}", is_candidate=which == 1, name=name if which else BROKEN
        )


def _reason(error: Exception) -> str:
    """The first line of an error, and the last line of a server's log."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1][:300]}"
