"""Rounds of a gate on real servers: both are started anew, asked in turn, and stopped.

Every round starts new processes, because a process differs from the next of the same program
(memory layout, caches), and no length of load on one would show that. Within a round the slices of
load alternate, A B B A and in the next round B A A B, so that what the machine does meanwhile falls
on both alike. A server that somebody else runs is only asked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtests import run as running
from loadtests.environments import Missing
from loadtests.gate.criteria import Half, Round, half_of
from loadtests.gate.sides import Published, Side
from loadtests.gate.slo import Slo
from loadtests.processes import ServerFailed
from loadtests.run import NotMeasured
from loadtests.samples import Load, Run
from loadtests.serving.cases import BadCases, Cases
from loadtests.serving.cases import read as read_cases
from loadtests.serving.gateway import Gateway
from loadtests.serving.served import Served, served
from loadtests.target import Protocol, Target

#: A baseline that fails this often is no measure for anything.
MOST_BASELINE_ERRORS = 0.1
Say = Callable[[str], None]


class Lost(Exception):
    """A side cannot be measured any more; the message names it and says why."""

    def __init__(self, message: str, *, is_candidate: bool) -> None:
        super().__init__(message)
        self.is_candidate = is_candidate


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
    #: Requests with their right answers; None: not yet recorded.
    payloads: Path | None = None
    #: Starts, so that each has a folder of its own.
    _starts: int = 0

    @contextlib.contextmanager
    def live(self, number: int) -> Iterator[Live]:
        """Side ``number`` (0: baseline), answering inside the block.

        Raises:
            Lost: it does not become ready, or does not answer rightly.
        """
        side = self.sides[number]
        if not isinstance(side, Published):
            yield Live(side.target(self.protocol), None, None)
            return
        self._starts += 1
        name = ("baseline", "candidate")[number]
        backend = Gateway(side.folder, side.version, ("--exit-on-error", "true"))
        with contextlib.ExitStack() as stack:
            try:
                server = stack.enter_context(
                    served(
                        backend,
                        self.work / f"{self._starts}-{name}",
                        cores=self.cores.server,
                        ready_seconds=self.slo.duration.ready_seconds,
                    )
                )
                first = self._first_response(server)
            except (ServerFailed, Missing) as error:
                raise self._lost(number, f"does not start: {_reason(error)}") from error
            yield Live(server.targets[self.protocol], server, first)

    def round(self, number: int) -> tuple[Round, tuple[list[Run], list[Run]]]:
        """Both sides next to each other, and their runs.

        Raises:
            Lost: a side broke.
        """
        order = (0, 1) if number % 2 == 0 else (1, 0)
        with contextlib.ExitStack() as stack:
            live = {which: stack.enter_context(self.live(which)) for which in order}
            runs: tuple[list[Run], list[Run]] = ([], [])
            for slice_ in range(2 * self.slo.duration.slices):
                which = order[(slice_ + 1) // 2 % 2]
                self.say(f"round {number + 1}: {('baseline', 'candidate')[which]}")
                runs[which].append(self._slice(which, live[which], number))
        baseline, candidate = (
            half_of(runs[which], live[which].cold_start_seconds, live[which].first_response_seconds)
            for which in (0, 1)
        )
        self._check_baseline(baseline, runs[0])
        return Round(baseline, candidate), runs

    def _slice(self, which: int, live: Live, number: int) -> Run:
        traffic, duration = self.slo.load, self.slo.duration
        load = Load(
            users=traffic.users,
            rate=traffic.rate_per_second,
            duration_seconds=duration.slice_seconds,
            warmup_seconds=duration.warmup_seconds,
            batch_size=traffic.batch_size,
            seed=self.seed + number,
            timeout_seconds=traffic.timeout_seconds,
        )
        try:
            run = running.measure(live.target, load, self.payloads, core=self.cores.client)
        except NotMeasured as error:
            raise self._lost(which, f"cannot be asked: {_reason(error)}") from error
        if live.server is not None and not live.server.alive:
            status = live.server.process.returncode
            raise self._lost(which, f"ended under load, with status {status}")
        return run

    def _first_response(self, server: Served) -> float | None:
        """Process start to the first correct answer; None where none is known to be correct."""
        if self.payloads is None:
            return None
        cases = self._cases()
        if cases is None:
            return None
        within = self.slo.duration.ready_seconds
        return server.first_response(cases, within_seconds=within)

    def _cases(self) -> Cases | None:
        """Text inputs cannot be asked for in this way."""
        assert self.payloads is not None
        try:
            return read_cases(self.payloads)
        except BadCases:
            return None

    def _check_baseline(self, half: Half, runs: list[Run]) -> None:
        if half.asked and half.errors <= MOST_BASELINE_ERRORS * half.asked:
            return
        said = next((message for run in runs for message in run.errors), "no answer")
        raise self._lost(0, f"fails {half.errors} of {half.asked} requests: {said}")

    def _lost(self, which: int, why: str) -> Lost:
        name = ("baseline", "candidate")[which]
        return Lost(f"the {name} {why}", is_candidate=which == 1)


def _reason(error: Exception) -> str:
    """In one line: what it says first, and the last thing in a server's log."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1][:300]}"
