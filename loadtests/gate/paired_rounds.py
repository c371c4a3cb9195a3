"""Rounds of a gate on real servers: both are started anew, asked in turn, and stopped.

Every round starts new processes, because a process differs from the next of the same program
(memory layout, caches), and no length of load on one would show that. Within a round the two take
turns, A B B A and in the next round B A A B, so that what the machine does meanwhile falls on both
alike:

- A lone user without a rate takes turns **request by request**, from one load generator. A burst of
  a neighbour's lasts milliseconds to seconds, and decides a p99: both sides meet the same bursts,
  and its noise leaves the ratio. What a server still does after its answer can fall on the other's
  next request; half of the turns, the second of A A, are not hit.
- Several users, or a rate, keep a side busy all the time: there they take turns in **slices** of
  load, seconds long, because two servers under load at once would measure each other.

A server that somebody else runs is only asked.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modelport.loadtests import payloads
from modelport.loadtests import run as running
from modelport.loadtests.environments import Missing
from modelport.loadtests.gate import answers
from modelport.loadtests.gate.criteria import WRONG, Half, Round, half_of
from modelport.loadtests.gate.decision import BROKEN
from modelport.loadtests.gate.sides import Published, Side
from modelport.loadtests.gate.slo import Slo
from modelport.loadtests.processes import ServerFailed
from modelport.loadtests.run import NotMeasured
from modelport.loadtests.samples import Load, Run
from modelport.loadtests.serving.gateway import Gateway
from modelport.loadtests.serving.served import AnswersWrongly, Served, served
from modelport.loadtests.target import Protocol, Target

#: A baseline that fails this often is no measure for anything.
MOST_BASELINE_ERRORS = 0.1
#: Seconds that a load takes besides its slices: its generator has to start and to end.
LOAD_SECONDS = 3.0
#: The question whether a candidate starts at all.
START = "start"
#: For what has begun when the time is over.
LEAST_SECONDS = 1.0
Say = Callable[[str], None]


class Lost(Exception):
    """A side cannot be measured any more; the message names it and says why."""

    def __init__(self, message: str, *, is_candidate: bool, name: str = BROKEN) -> None:
        super().__init__(message)
        self.is_candidate = is_candidate
        #: Of the question that this answers.
        self.name = name


class OutOfTime(Lost):
    """The longest duration is over before a side was ready."""


@dataclass(frozen=True)
class Cores:
    """Where servers and load generator run, so that they do not take each other's time."""

    server: tuple[int, ...] = ()
    client: int | None = None

    @classmethod
    def of_this_machine(cls) -> Cores:
        """The last for the client, where there are two; every other for the server."""
        if not hasattr(os, "sched_getaffinity"):
            return cls()
        *server, client = sorted(os.sched_getaffinity(0))
        return cls(tuple(server), client) if server else cls()


@dataclass(frozen=True)
class Live:
    """A side that answers."""

    target: Target
    server: Served | None
    first_response_seconds: float | None

    @property
    def cold_start_seconds(self) -> float | None:
        return None if self.server is None else self.server.cold_start_seconds


@dataclass
class Duel:
    """Baseline and candidate, and what they are asked."""

    sides: tuple[Side, Side]
    protocol: Protocol
    slo: Slo
    seed: int
    #: An empty folder for logs.
    work: Path
    cores: Cores
    say: Say
    #: When the gate must be over, on the clock of ``time.monotonic()``.
    ends: float
    #: The same requests for either side, with its right answers; None: not yet recorded.
    payloads: tuple[Path, Path] | None = None
    #: The baseline's right answers are its own.
    is_learnt: bool = False
    #: Of the last start of either side, until it was ready.
    start_seconds: dict[int, float] = field(default_factory=dict)
    #: Starts, so that each has a folder of its own.
    _starts: int = 0

    @contextlib.contextmanager
    def live(self, number: int) -> Iterator[Live]:
        """Side ``number`` (0: baseline), answering inside the block.

        Raises:
            Lost: it does not become ready in the time that is left, or does not answer rightly.
        """
        side = self.sides[number]
        if not isinstance(side, Published):
            yield Live(side.target(self.protocol), None, None)
            return
        self._starts += 1
        name = ("baseline", "candidate")[number]
        backend = Gateway(side.folder, side.version, ("--exit-on-error", "true"))
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
            yield Live(server.targets[self.protocol], server, first)

    @property
    def left(self) -> float:
        """Seconds until the gate must be over."""
        return self.ends - time.monotonic()

    @property
    def round_seconds(self) -> float:
        """What the next round takes at least."""
        duration = self.slo.duration
        loads = 1 if self.slo.load.is_lone else 2 * duration.slices
        loading = 2 * duration.slices * duration.slice_seconds
        started = sum(self.start_seconds.values())
        return started + loading + loads * (duration.warmup_seconds + LOAD_SECONDS)

    def _out_of_time(self, name: str, within: float, error: Exception) -> OutOfTime:
        most = self.slo.duration.max_seconds
        said = str(error).splitlines()[0]
        return OutOfTime(
            f"the {name} did not start in the {within:.0f} s that were left of --max-duration "
            f"{most:g}s ({said}); give it longer",
            is_candidate=False,
        )

    def round(self, number: int) -> tuple[Round, tuple[list[Run], list[Run]]]:
        """Both sides next to each other, and their runs.

        Raises:
            Lost: a side broke.
        """
        order = (0, 1) if number % 2 == 0 else (1, 0)
        with contextlib.ExitStack() as stack:
            live = {which: stack.enter_context(self.live(which)) for which in order}
            runs: tuple[list[Run], list[Run]] = ([], [])
            for which, run in self._runs(order, live, number):
                runs[which].append(run)
        baseline, candidate = (
            half_of(runs[which], live[which].cold_start_seconds, live[which].first_response_seconds)
            for which in (0, 1)
        )
        self._check_baseline(baseline, runs[0])
        return Round(baseline, candidate), runs

    def _runs(
        self, order: tuple[int, int], live: Mapping[int, Live], number: int
    ) -> Iterator[tuple[int, Run]]:
        """(side, its run) of one round, in turn; each side the same seconds of load."""
        slices = 2 * self.slo.duration.slices
        if self.slo.load.is_lone:
            self.say(f"round {number + 1}: both in turn")
            with contextlib.suppress(NotMeasured):  # by itself, a side says what is wrong with it
                yield from self._together(order, live, self._load(number, slices))
                return
        for slice_ in range(slices):
            which = order[(slice_ + 1) // 2 % 2]
            self.say(f"round {number + 1}: {('baseline', 'candidate')[which]}")
            yield which, self._slice(which, live[which], self._load(number))

    def _load(self, number: int, slices: int = 1) -> Load:
        traffic, duration = self.slo.load, self.slo.duration
        return Load(
            users=traffic.users,
            rate=traffic.rate_per_second,
            duration_seconds=slices * duration.slice_seconds,
            warmup_seconds=duration.warmup_seconds,
            batch_size=traffic.batch_size,
            seed=self.seed + number,
            timeout_seconds=max(LEAST_SECONDS, min(traffic.timeout_seconds, self.left)),
        )

    def _together(
        self, order: tuple[int, int], live: Mapping[int, Live], load: Load
    ) -> list[tuple[int, Run]]:
        """Raises Lost, NotMeasured."""
        assert self.payloads is not None
        data = [self.payloads[which] for which in order]
        targets = [(live[which].target, 1) for which in order]
        made = running.measure_mix(targets, load, data, core=self.cores.client)
        for which in order:
            self._check_alive(which, live[which])
        return list(zip(order, made, strict=True))

    def _slice(self, which: int, live: Live, load: Load) -> Run:
        assert self.payloads is not None
        try:
            run = running.measure(live.target, load, self.payloads[which], core=self.cores.client)
        except NotMeasured as error:
            self._check_alive(which, live)
            if self._answers(which, live):  # nothing that the side could be failed for
                raise Lost(f"no load: {_reason(error)}", is_candidate=False) from error
            raise self._lost(which, f"cannot be asked: {_reason(error)}") from error
        self._check_alive(which, live)
        return run

    def _answers(self, which: int, live: Live) -> bool:
        assert self.payloads is not None
        asked = payloads.read(self.payloads[which])
        return answers.responds(asked, live.target, self.slo.load.timeout_seconds)

    def _check_alive(self, which: int, live: Live) -> None:
        if live.server is not None and not live.server.alive:
            status = live.server.process.returncode
            raise self._lost(which, f"ended under load, with status {status}")

    def _first_response(self, which: int, server: Served, within: float) -> float | None:
        """Process start to the first correct answer; None in the rehearsal, which learns them."""
        if self.payloads is None:
            return None
        return server.first_response(payloads.read(self.payloads[which]), within_seconds=within)

    def _check_baseline(self, half: Half, runs: list[Run]) -> None:
        said = next((message for run in runs for message in run.errors), "no answer")
        if not half.asked or half.errors > MOST_BASELINE_ERRORS * half.asked:
            raise self._lost(0, f"fails {half.errors} of {half.asked} requests: {said}")
        allowed = self.slo.limits.max_wrong_share
        if self.is_learnt and allowed is not None and half.wrong > allowed * half.asked:
            raise self._lost(
                0,
                f"gives other answers than before to {half.wrong} of {half.asked} requests "
                f"({said}): give the right ones with --data, or allow more in [answers]",
            )

    def _lost(self, which: int, why: str, name: str = BROKEN) -> Lost:
        side = ("baseline", "candidate")[which]
        return Lost(f"the {side} {why}", is_candidate=which == 1, name=name if which else BROKEN)


def _reason(error: Exception) -> str:
    """In one line: what it says first, and the last thing in a server's log."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1][:300]}"
