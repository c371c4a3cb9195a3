"""One load in one Locust process: the shared state of its users, and their loops."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import gevent
from gevent.event import Event

from modelport.gateway.errors import plain_reason
from modelport.loadtests.load import load_shapes, sample_recording
from modelport.loadtests.load import payloads as files
from modelport.loadtests.load.locust_arguments import Plan
from modelport.loadtests.load.payloads import Payloads
from modelport.loadtests.load.samples import LoadProfile, Outcome
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.users import random_requests, signature
from modelport.loadtests.users.answer_checker import Checker
from modelport.loadtests.users.client import DialectClient, Unanswered
from modelport.loadtests.users.protocol_table import Dialect, dialect
from modelport.loadtests.users.sockets import Sockets

FLUSH_SECONDS = 0.25
#: Interval at which a single user lets other greenlets run.
TURN_SECONDS = 0.05
#: Time between the last connection and the first request.
LEAD_SECONDS = 0.02
#: Pause after an immediate refusal, so that a closed loop does not spin.
PAUSE_SECONDS = 0.05
#: Final part of a wait, which spins because no timer is exact enough.
SPIN_SECONDS = 0.0003

#: Called with the target, latency in seconds, bytes of the answer, and its problem.
Report = Callable[[LoadTestTarget, float, int, str | None], None]


class Impossible(RuntimeError):
    """No request can be sent; the message has the reason."""


class TargetLoad:
    """One target of the load: prepared requests, the checker, the due times."""

    def __init__(
        self,
        number: int,
        target: LoadTestTarget,
        weight: int,
        payloads: Payloads,
        load: LoadProfile,
    ) -> None:
        self.number, self.target, self.weight, self.payloads = number, target, weight, payloads
        self.dialect: Dialect = dialect(target.protocol)
        self.checker = Checker(payloads, self.dialect.read)
        count = len(payloads.requests)
        self.prepared: list[Any] = [self.dialect.prepare(target, payloads, n) for n in range(count)]
        self.turns = itertools.cycle([(load.seed + n) % count for n in range(count)])
        self.users = 0
        self.due: Iterator[float] = iter(())

    def client(self, timeout_seconds: float) -> DialectClient:
        return self.dialect.connect(self.target, timeout_seconds)

    def rehearse(self, timeout_seconds: float) -> None:
        """Send every request once if expected answers must be recorded, otherwise one request.

        Raises:
            Impossible: the server does not respond, or responds with an error.
        """
        client = self.client(timeout_seconds)
        learns = self.payloads.expected is None
        try:
            client.connect()
            for number in range(len(self.prepared) if learns else 1):
                body, size = client.ask(self.prepared[number])
                if learns:
                    self.checker.learn(number, body, size)
        except Unanswered as error:
            raise Impossible(_unasked(self.target, error)) from error
        except Exception as error:  # an unexpected answer
            said = f"{type(error).__name__}: {error}"
            raise Impossible(
                f"{self.target.url}: its response is not valid {self.target.protocol} ({said}); "
                "is --protocol right?"
            ) from error
        finally:
            client.close()


def _unasked(target: LoadTestTarget, error: Unanswered) -> str:
    said = str(error)
    if said.startswith("cannot connect"):
        return f"{target.url}: {said}; is the server running there, and is this the right port?"
    return f"{target.url}: the request before the load failed: {said}"


class LoadDriver:
    """Runs a load: ``prepare``, then users ``join`` and ``drive``; ``on_end`` follows the last."""

    def __init__(self, plan: Plan, on_end: Callable[[], None], report: Report | None) -> None:
        self.plan, self.load = plan, plan.load
        self.target_loads: list[TargetLoad] = []
        self._on_end, self._report = on_end, report
        self._recorder = (
            sample_recording.Recorder(plan.samples_to, len(plan.targets))
            if plan.samples_to
            else None
        )
        #: Whether writing the samples failed.
        self.unwritten = False
        self._go = Event()
        self._failed = False
        self._began = 0.0
        self._joined = self._left = 0
        self._flushing: gevent.Greenlet | None = None

    # -- before the load ---------------------------------------------------------------------------

    def prepare(self) -> None:
        """Prepare payloads and requests, and send the first ones.

        Raises:
            Impossible: see its message.
        """
        plan = self.plan
        try:
            for number, (target, weight) in enumerate(plan.targets):
                target_load = TargetLoad(
                    number, target, weight, self._payloads(number, target), plan.load
                )
                target_load.rehearse(plan.load.timeout_seconds)
                self.target_loads.append(target_load)
        except (ValueError, signature.SignatureUnknown) as error:
            raise Impossible(str(error)) from error
        except Impossible:
            raise
        except Exception as error:  # Locust would log it and continue without a load
            raise Impossible(f"unexpected {type(error).__name__}: {error}") from error
        if plan.load.rate is not None:
            self._plan_arrivals()

    def _payloads(self, number: int, target: LoadTestTarget) -> Payloads:
        plan = self.plan
        told = signature.read_file(plan.config) if plan.config is not None else None
        if plan.data:
            path = plan.data[number if len(plan.data) > 1 else 0]
            if told is None and files.needs_signature(path):
                told = signature.ask(target)
            return files.read(path, told, plan.load.batch_size)
        return random_requests.draw(
            told or signature.ask(target), plan.load.batch_size, plan.load.seed
        )

    def _plan_arrivals(self) -> None:
        weights = sum(target_load.weight for target_load in self.target_loads)
        part, parts = self.plan.part
        for target_load in self.target_loads:
            offset = (part + target_load.number / len(self.target_loads)) / parts
            due = load_shapes.arrivals(self.load, target_load.weight / weights / parts, offset)
            target_load.due = iter(memoryview(due.data))  # avoids a list of all times

    def shared_out(self) -> list[tuple[tuple[TargetLoad, ...], int]]:
        """The kinds of users: the target loads of each kind, and its number of users.

        Every kind has one target load. Every target load has at least one user, and the rest
        follow the weights. A single user of a closed loop serves all of them in turn.
        """
        if self.load.has_single_user:
            return [(tuple(self.target_loads), 1)]
        users = [1] * len(self.target_loads)
        for _ in range(self.load.users - len(users)):  # as seats in a parliament (D'Hondt)
            most = max(
                self.target_loads,
                key=lambda target_load: target_load.weight / (users[target_load.number] + 1),
            )
            users[most.number] += 1
        return [((target_load,), users[target_load.number]) for target_load in self.target_loads]

    def join(self, target_load: TargetLoad) -> int:
        """Register a connected user of ``target_load``; return its number there, from 0."""
        target_load.users += 1
        self._joined += 1
        return target_load.users - 1

    def begin(self) -> None:
        """Start the load, as all users are connected."""
        if self._go.is_set() or self._failed:
            return
        gc.collect()
        gc.freeze()  # a garbage collection of all of Locust's modules takes milliseconds
        self._began = perf_counter() + LEAD_SECONDS
        if self._recorder is not None:
            self._recorder.begin(self._began)
            self._flushing = gevent.spawn(self._keep_flushing)
        self._go.set()

    # -- the load ----------------------------------------------------------------------------------

    def drive(self, user: int, clients: Sequence[tuple[TargetLoad, DialectClient]]) -> None:
        """Run a user until the load is over."""
        self._go.wait()
        _sleep_until(self._began)
        try:
            if self.load.rate is None:
                self._closed_loop(user, in_turn(clients))
            else:
                self._open_loop(*clients[0])
        finally:
            self._left += 1
            if self._left == self._joined:
                self._end()

    def _closed_loop(self, user: int, turns: Iterator[tuple[TargetLoad, DialectClient]]) -> None:
        load, began = self.load, self._began
        end = began + load.warmup_seconds + load.duration_seconds
        turned = 0.0
        steady = load.shape in ("constant", "soak")
        while (now := perf_counter()) < end:
            if (
                not steady
                and (moment := load_shapes.next_change(load, user, now - began)) > now - began
            ):
                _sleep_until(min(began + moment, end))
                continue
            self._ask(*next(turns), None)
            if Sockets.lone and now - turned > TURN_SECONDS:
                turned = now
                gevent.sleep(0)  # a single user waits in the kernel; other greenlets run only here

    def _open_loop(self, target_load: TargetLoad, client: DialectClient) -> None:
        began = self._began
        for due in target_load.due:  # shared by its users; the first free one takes the next
            _sleep_until(began + due)
            if (now := perf_counter()) - began - due > self.load.timeout_seconds:
                # Record a request whose client would have given up, so that an overload can end.
                intended = began + due
                why = f"not sent within {self.load.timeout_seconds:g} s: every user was waiting"
                self._record(target_load, (intended, now, now, now), Outcome.TIMED_OUT, 0, why)
            else:
                self._ask(target_load, client, began + due)

    def _ask(self, target_load: TargetLoad, client: DialectClient, intended: float | None) -> None:
        number = next(target_load.turns)
        outcome, size, problem = Outcome.OK, 0, None
        try:
            body, json_size = client.ask(target_load.prepared[number])
        except Unanswered as error:
            outcome, problem = error.outcome, str(error)
        else:
            size = len(body)
            problem = target_load.checker.problem(number, body, json_size)
            if problem is not None:
                outcome = Outcome.WRONG
        begin = client.sent if intended is None else intended
        times = (begin, client.sent, client.first_byte, client.done)
        self._record(target_load, times, outcome, size, problem)
        if outcome == Outcome.FAILED and intended is None:
            gevent.sleep(PAUSE_SECONDS)

    def _record(
        self,
        target_load: TargetLoad,
        times: tuple[float, float, float, float],
        outcome: Outcome,
        size: int,
        problem: str | None,
    ) -> None:
        """Record a request; ``times`` are intended, sent, first byte, done."""
        begin, done = times[0], times[3]
        if self._recorder is not None:
            self._recorder.add(target_load.number, *times, outcome)
            if problem is not None and begin - self._began >= self.load.counted_from_seconds:
                self._recorder.error(target_load.number, problem)
        if self._report is not None:
            self._report(target_load.target, done - begin, size, problem)

    # -- after it ----------------------------------------------------------------------------------

    def _keep_flushing(self) -> None:
        assert self._recorder is not None
        while True:
            gevent.sleep(FLUSH_SECONDS)
            try:
                self._recorder.flush()
            except OSError as error:
                self.unwritten = True
                self.fail(f"{sample_recording.UNWRITTEN}: {plain_reason(error)}")
                return

    def _end(self) -> None:
        if self._flushing is not None:
            self._flushing.kill()
        if self._recorder is not None:
            self._recorder.state.finished = not self._recorder.state.failure
            self.save()
        self._on_end()

    def fail(self, message: str) -> None:
        """End the load, or prevent it, with the reason ``message``."""
        self._failed = True
        if self._recorder is not None:
            self._recorder.state.failure = message
            self.save()
        self._on_end()

    def save(self) -> None:
        """Write the remaining records to disk, as far as possible."""
        if self._recorder is None:
            return
        try:
            self._recorder.flush()
        except OSError as error:
            self.unwritten = True
            self._recorder.state.failure = f"{sample_recording.UNWRITTEN}: {plain_reason(error)}"


def in_turn(
    clients: Sequence[tuple[TargetLoad, DialectClient]],
) -> Iterator[tuple[TargetLoad, DialectClient]]:
    """Yield each by its weight, there and back (A B B A), so that none is always second."""
    there = [pair for pair in clients for _ in range(pair[0].weight)]
    return itertools.cycle([*there, *reversed(there)])


def _sleep_until(moment: float) -> None:
    """Let other greenlets run until then; spin at the end, as timers wake late."""
    while (left := moment - perf_counter()) > 0:
        gevent.sleep(left - SPIN_SECONDS if left > SPIN_SECONDS else 0)
