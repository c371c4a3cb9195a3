"""One rollout with one fault at a random moment, under load, and what must hold of it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from modelport.gateway.rollout.shared_state.state_files import RolloutFiles
from modelport.gateway.rollout.shared_state.state_store import RolloutStore
from tests.gateway.server.workers.processes import workers
from tests.polling import eventually
from tests.rollout_faults.clients import (
    BASELINE,
    LABEL,
    MODEL,
    UNLOADED,
    Attempt,
    LedgerClients,
)
from tests.rollout_faults.served import (
    PATH,
    ROUTE,
    GatewayPlace,
    Look,
    StatusWatcher,
    place,
    remote_repository,
    repository,
)
from tests.server import Gateway, serving

#: Counts of the last second may be lost at a kill.
LOST_SECONDS = 1.0
#: Time after a kill in which clients find out that their connections are broken.
NOTICE_SECONDS = 1.0
#: Answers of each client after the end.
AFTERWARDS = 10
#: A candidate with a fifth of the traffic misses all of this many requests in 0.1 % of rollouts.
CHANCES = 30
#: The last two are told while a gateway loads its models after a restart.
_NOBODY_THERE = (
    "ConnectionRefusedError", "status 503", "StatusCode.UNAVAILABLE", "is not found",
    "Unrecognized servable version label",
)  # fmt: skip


class RolloutFault(StrEnum):
    NONE = "none"
    KILL_WORKER = "kill -9 of a worker"
    KILL_GATEWAY = "kill -9 of the gateway"
    TERMINATE = "SIGTERM of the gateway"
    KILL_BACKEND = "kill -9 of the candidate's server"


@dataclass(frozen=True)
class FaultScenario:
    """A fault ``delay`` seconds into a stage, and the end of the rollout.

    Attributes:
        candidate: 2 is good, 3 is bad, and ``remote`` is another server's.
        commanded: whether a person rolls it back some time after the fault.
        label: whether a label is rolled out, with a client of TensorFlow Serving that asks for it.
        sticky: whether requests are assigned by their key.
        keep: whether the candidate stays loaded after a rollback.
    """

    seed: int
    fault: RolloutFault
    workers: int
    candidate: str
    commanded: bool
    stage: int
    delay: float
    variant: str = ""
    label: bool = False
    sticky: bool = False
    keep: bool = False

    @classmethod
    def drawn(cls, seed: int, fault: RolloutFault | None = None) -> FaultScenario:
        """A scenario at random; those with seeds in a row have all faults in turn."""
        randomness = random.Random(seed)
        fault = fault or list(RolloutFault)[1 + seed % (len(RolloutFault) - 1)]
        candidate = randomness.choice(("2", "2", "3"))
        if fault is RolloutFault.KILL_BACKEND:
            candidate = "remote"
        return cls(
            seed, fault,
            workers=2 if fault is RolloutFault.KILL_WORKER else randomness.choice((1, 2)),
            candidate=candidate,
            commanded=candidate == "2" and randomness.random() < 0.5,
            stage=randomness.randrange(3) if candidate == "2" else randomness.randrange(2),
            delay=randomness.uniform(0.0, 1.5),
            label=randomness.random() < 0.5,
        )  # fmt: skip

    @property
    def expected(self) -> str:
        good = self.candidate == "2" and not self.commanded
        return "promoted" if good else "rolled back"

    @property
    def request(self) -> dict[str, Any]:
        """The body of the start. A candidate that is no good gets to answer clients."""
        shadow = 0.0 if self.candidate == "3" else 0.5
        steps = (0.2, 0.5, 1.0) if self.candidate == "3" else (0.3, 1.0)
        off = dict.fromkeys(("max_p50_regression", "max_p99_regression"))
        return {
            "candidate": self.candidate, "shadow": shadow, "steps": steps, "limits": off,
            "pair": self.candidate == "3", "min_requests": 50, "power": 0.0,
            "min_seconds": 30.0 if self.manual else 1.0,
            "manual": self.manual, "max_seconds": 600.0, "label": LABEL if self.label else "",
            "sticky": "header" if self.sticky else "request", "keep": self.keep,
        }  # fmt: skip

    @property
    def manual(self) -> bool:
        """Whether stages end by command, because nothing else ends them before the fault."""
        return self.commanded or self.candidate == "remote"


@dataclass
class ScenarioResult:
    scenario: FaultScenario
    violations: list[str] = field(default_factory=list)
    requests: int = 0
    candidate_answers: int = 0
    #: Attempts that a kill cut off, and attempts while no gateway ran; all were made again.
    in_flight: int = 0
    refused: int = 0
    phase: str = ""
    seconds: float = 0.0

    def check(self, holds: object, violation: str) -> None:
        if not holds:
            self.violations.append(violation)


def run(scenario: FaultScenario) -> ScenarioResult:
    result, began = ScenarioResult(scenario), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        running = RunningScenario(scenario, result, Path(folder), stack)
        try:
            running.run()
        except (TimeoutError, AssertionError) as error:
            result.violations.append(f"{type(error).__name__}: {str(error)[:500]}")
        finally:
            running.clients.finish()
            running.watcher.finish()
        running.judge()
    result.seconds = time.monotonic() - began
    return result


class RunningScenario:
    """A scenario with its processes."""

    def __init__(
        self, scenario: FaultScenario, result: ScenarioResult, folder: Path, stack: ExitStack
    ) -> None:
        self._scenario, self._result, self._stack = scenario, result, stack
        flags = ["--workers", str(scenario.workers)] if scenario.workers > 1 else []
        if scenario.candidate == "remote":
            self._remote = stack.enter_context(serving(remote_repository(folder / "remote")))
            (folder / "routes.toml").write_text(ROUTE.format(port=self._remote.grpc_port))
            flags += ["--routes", str(folder / "routes.toml")]
        root = repository(folder / "repository")
        self._place: GatewayPlace = place(root, *flags, variant=scenario.variant)
        self._gateway: Gateway = self._place.start()
        stack.callback(lambda: self._gateway.close())
        self.clients = LedgerClients(
            self._place.http_port,
            self._place.grpc_port,
            label=scenario.label,
            keyed=scenario.sticky,
        )
        self.watcher = StatusWatcher(self._place.admin)
        #: The times in which attempts may fail, and the fault.
        self._outage: tuple[float, float] | None = None
        #: The time at which the end was told.
        self._ended = float("inf")
        #: The times between which the candidate could answer clients.
        self._open, self._broken = float("inf"), float("inf")
        #: The time at which a rollback was asked for.
        self._commanded = float("inf")
        self._id = ""

    # -- acts -------------------------------------------------------------------------------------

    def run(self) -> None:
        eventually(lambda: self.clients.answered_since(0.0) > 2, "the first answers")
        self._id = self._place.admin.post(PATH, self._scenario.request)["plan"]["id"]
        self._reach_stage()
        time.sleep(self._scenario.delay)
        self._break()
        self._end()

    def _reach_stage(self) -> None:
        scenario = self._scenario
        first = 0 if scenario.candidate == "3" else 1  # a shadow answers no client
        for number in range(scenario.stage + 1):
            reached = eventually(lambda n=number: self._look(n), f"stage {number}")  # type: ignore[misc]
            if number == first:
                self._open = reached.at
            if reached.state["phase"] != "running":
                return
            if scenario.manual and number < scenario.stage:
                self._place.admin.post(f"{PATH}/promote", {})

    def _look(self, stage: int) -> Look | None:
        for look in self.watcher.looks[-1:]:
            if look.state["stage"] >= stage or look.state["phase"] != "running":
                return look
        return None

    def _break(self) -> None:
        fault, before = self._scenario.fault, self.watcher.looks[-1]
        if fault is RolloutFault.KILL_BACKEND:
            self._remote.process.kill()
            self._broken = time.monotonic()
        elif fault is RolloutFault.KILL_WORKER:
            pid = random.choice(sorted(workers(self._gateway).values()))
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            self._outage = (killed, killed + NOTICE_SECONDS)
        elif fault is not RolloutFault.NONE:
            self._restart(before)

    def _restart(self, before: Look) -> None:
        killed = time.monotonic()
        if self._scenario.fault is RolloutFault.TERMINATE:
            status = self._gateway.terminate(60.0)
            self._result.check(status == 0, f"the gateway ended with status {status}")
        else:
            self._gateway.process.kill()
            self._gateway.process.wait()
        self._outage = (killed, float("inf"))
        state, counted = asyncio.run(self._stored())
        self._gateway.close()
        self._gateway = self._place.start()
        now = self._place.admin.get(PATH)
        self._outage = (killed, time.monotonic() + NOTICE_SECONDS)
        self._same_stage(before.state, state, now)
        ended = state["phase"] not in ("running", "paused")
        answers = sorted(
            (each for each in self.clients.attempts if self._by_candidate(each)),
            key=lambda each: each.ended,
        )
        told = sum(each.ended < killed - LOST_SECONDS for each in answers)
        if not ended:
            self._result.check(
                counted >= told,
                f"{told - counted} of {told} counts older than a second were lost, "
                f"the oldest {killed - answers[counted].ended:.2f} s old"
                if counted < told
                else "",
            )
            if now["phase"] in ("running", "paused"):
                total = sum(each["candidate"]["requests"] for each in now["counts"])
                self._result.check(total >= counted, f"{counted} were stored, {total} came back")

    async def _stored(self) -> tuple[dict[str, Any], int]:
        """The state in the repository, and the number of answers of the candidate in it."""
        store = RolloutStore(RolloutFiles(self._place.root, 30.0))
        revision = (await store.look())[MODEL]
        state = await store.read(MODEL, revision)
        counts = await store.read_counts(MODEL, self._id, "")
        return state.to_json(), sum(each.candidate.requests for each in counts.values())

    def _same_stage(
        self, before: dict[str, Any], state: dict[str, Any], now: dict[str, Any]
    ) -> None:
        check = self._result.check
        told = len(before["events"])
        check(state["events"][:told] == before["events"], "a status was told and not recorded")
        recorded = len(state["events"])
        check(now["events"][:recorded] == state["events"], "the restart lost events")
        check(now["plan"]["id"] == self._id, "the restart forgot the rollout")
        if len(now["events"]) == recorded:
            here, there = ((each["phase"], each["stage"]) for each in (state, now))
            check(here == there, f"{here} before the restart, and {there} after it")

    def _end(self) -> None:
        """Let the rollout end, and ask for a while."""
        scenario, admin = self._scenario, self._place.admin
        if scenario.commanded:
            eventually(lambda: self.clients.answered_since(self._outage_end), "answers")
            if self.watcher.looks[-1].state["phase"] == "running":
                self._commanded = time.monotonic()
                admin.post(f"{PATH}/rollback", {"reason": "a hunch"})
                self._ended = time.monotonic()
        told = eventually(lambda: self.watcher.first(phase=scenario.expected), "the verdict")
        self._ended = min(self._ended, told.at)
        settled = eventually(lambda: self.watcher.first(settled=True), "the outcome settled")
        since = max(settled.at, self._outage_end)
        eventually(lambda: self.clients.answered_since(since) >= AFTERWARDS, "more answers")
        self._check_history(admin.get(f"{PATH}/history"))
        self._result.phase = settled.state["phase"]
        if scenario.expected == "promoted":
            late = [
                each for each in self.clients.attempts
                if each.began > since and not (each.explicit or each.error)
            ]  # fmt: skip
            self._result.check(
                all(self._by_candidate(each) for each in late),
                "the baseline answered after the promotion",
            )

    @property
    def _outage_end(self) -> float:
        return self._outage[1] if self._outage is not None else 0.0

    def _check_history(self, history: list[dict[str, Any]]) -> None:
        verdicts = [(each["plan"]["id"], each["phase"]) for each in history]
        expected = [(self._id, self._scenario.expected)]
        self._result.check(verdicts == expected, f"the history has {verdicts}, not {expected}")

    # -- judgement --------------------------------------------------------------------------------

    def _by_candidate(self, attempt: Attempt) -> bool:
        return attempt.version not in ("", BASELINE)

    def judge(self) -> None:
        """Judge the ledger."""
        result, attempts = self._result, self.clients.attempts
        result.requests = sum(not each.error for each in attempts)
        result.candidate_answers = sum(self._by_candidate(each) for each in attempts)
        result.check(not self.clients.lost, f"{self.clients.lost} requests were never answered")
        for kind, found in self._problems(attempts):
            result.check(not found, f"{kind}: {len(found)}, such as {found[:2]}")
        if self._scenario.candidate == "3" or self._scenario.stage:
            result.check(result.candidate_answers, "the candidate answered nothing")
            label = [each for each in attempts if each.client == "label" and not each.explicit]
            begin, end = self._open, min(self._broken, self._ended)
            if sum(begin <= each.began < end for each in label) >= CHANCES:
                by_label = any(self._by_candidate(each) for each in label)
                result.check(by_label, "the candidate answered no request for the label")

    def _problems(self, attempts: list[Attempt]) -> Iterator[tuple[str, list[Attempt]]]:
        yield "answered wrongly", [each for each in attempts if each.wrong]
        if self._scenario.expected == "rolled back":
            late = [e for e in attempts if e.began > self._ended and self._by_candidate(e)]
            yield "reached the candidate after the rollback", late
        if self._scenario.sticky:
            yield "changed sides", list(self._back_at_the_baseline(attempts))
        yield "lost", [each for each in attempts if each.error and not self._excused(each)]

    def _back_at_the_baseline(self, attempts: list[Attempt]) -> Iterator[Attempt]:
        """Answers of the baseline for keys that had gone to the candidate, before a rollback."""
        end = self._commanded
        answers = [e for e in attempts if e.version and not e.explicit and e.ended < end]
        gone: dict[str, float] = {}
        for each in answers:
            if self._by_candidate(each):
                gone[each.key] = min(each.ended, gone.get(each.key, each.ended))
        for each in answers:
            if not self._by_candidate(each) and each.began > gone.get(each.key, each.began):
                yield each

    def _excused(self, attempt: Attempt) -> bool:
        """Whether the fault explains a failed attempt, which is counted."""
        result, fault = self._result, self._scenario.fault
        unloaded = attempt.explicit and any(each in attempt.error for each in UNLOADED)
        if unloaded and self._scenario.expected == "promoted":
            return True
        if self._outage is None:
            return False
        began, ended = self._outage
        if attempt.ended < began or attempt.began > ended:
            return False
        nobody = any(each in attempt.error for each in _NOBODY_THERE)
        if nobody and fault is not RolloutFault.KILL_WORKER:
            result.refused += 1
            return True
        if fault is RolloutFault.TERMINATE:
            return False
        result.in_flight += 1
        return True
