"""The serving processes of one gateway, as the controller of its rollouts uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from modelport.gateway.errors import ModelportError, Unavailable
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.rollout import settlement
from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide
from modelport.gateway.rollout.processes import ProcessCounts
from modelport.gateway.rollout.shared_state.state import RolloutPhase, RolloutRouting, RolloutState
from modelport.gateway.rollout.side_description import RolloutModelDescription, VersionDescription
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.rollout.traffic.participant import RolloutParticipant
from modelport.gateway.runtime import checked_json

#: Arguments of an operation, as JSON values.
Document = dict[str, Any]
#: The routings of all rollouts, by model.
Routings = Mapping[str, Document]
Answer = Any | ModelportError


class RolloutMembers(Protocol):
    """The serving processes: this one, or the workers that this one has started."""

    async def ask(self, operation: str, arguments: Document) -> Sequence[Answer]:
        """The answer or error of every process, without those that do not respond in time."""

    async def ask_patiently(self, operation: str, arguments: Document) -> Sequence[Answer]:
        """Ask as ``ask`` does, and wait as long as a process shows that it lives."""

    async def insist(self, operation: str, arguments: Document) -> None:
        """Ask as ``ask`` does, and replace processes that answer late, or with an error."""

    def notify(self, operation: str, arguments: Document) -> None:
        """Send to every process, and wait for no answer."""

    def remember(self, routings: Routings) -> None:
        """Have processes that start later begin with these routings."""


class ThisProcess:
    """The only serving process of its gateway."""

    def __init__(self, participant: RolloutParticipant) -> None:
        self._participant = participant
        self._tasks: set[asyncio.Task[Any]] = set()

    async def ask(self, operation: str, arguments: Document) -> Sequence[Answer]:
        """The answer or error of this process."""
        try:
            return [await self._participant.handlers[operation](arguments)]
        except ModelportError as error:
            return [error]

    ask_patiently = ask

    async def insist(self, operation: str, arguments: Document) -> None:
        await self._participant.handlers[operation](arguments)

    def notify(self, operation: str, arguments: Document) -> None:
        task = asyncio.ensure_future(self.ask(operation, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def remember(self, routings: Routings) -> None:
        pass


class ProcessGroup:
    """The processes of ``members``, which serve the models of ``repositories``.

    It implements ``RolloutProcesses``.
    """

    def __init__(self, members: RolloutMembers, repositories: Sequence[Path | Location]) -> None:
        self._members = members
        self._repositories = repositories
        self._routings: dict[str, Document] = {}
        #: The reasons why rollouts compare nothing, by id, as the processes last said.
        self._problems: dict[str, str] = {}

    # -- the controller's -------------------------------------------------------------------------

    async def collect(self) -> Mapping[str, ProcessCounts]:
        found, problems = {}, dict[str, str]()
        for answer in await self._members.ask("rollout_counts", {}):
            if isinstance(answer, ModelportError):
                continue
            found[answer["process"]] = {
                rollout: {
                    int(stage): StageCounts.from_json(counts)
                    for stage, counts in document["stages"].items()
                }
                for rollout, document in answer["counts"].items()
            }
            for rollout, document in answer["counts"].items():
                problems[rollout] = document["problem"] or problems.get(rollout, "")
        self._problems = problems
        return found

    def comparison_problem(self, rollout_id: str) -> str:
        return self._problems.get(rollout_id, "")

    async def apply(self, routing: RolloutRouting) -> None:
        document: Document = orjson.loads(checked_json.write(routing.to_json()))
        self._routings[routing.plan.model] = document
        self._members.remember(self._routings)
        if routing.share:  # a side that is not served yet is not at fault
            await self._members.ask_patiently("rollout_hold_sides", {"routing": document})
        await self._members.insist("rollout_apply", {"routing": document})
        if not routing.share:
            await self._members.ask_patiently("rollout_hold_sides", {"routing": document})

    async def remove(self, state: RolloutState) -> None:
        plan, winner = state.plan, None
        if state.phase is RolloutPhase.PROMOTED:
            winner = plan.candidate
        elif state.phase is RolloutPhase.ROLLED_BACK:
            winner = plan.baseline
        self._routings.pop(plan.model, None)
        self._members.remember(self._routings)
        await self._remove(plan, winner)

    async def _remove(self, plan: RolloutPlan, winner: RolloutSide | None) -> None:
        arguments = {"plan": plan.to_json(), "winner": None if winner is None else list(winner)}
        await self._members.ask_patiently("rollout_remove", arguments)

    def renew(self, model: str, until: float) -> None:
        self._members.notify("rollout_renew", {"model": model, "until": until})

    async def side_problem(self, side: RolloutSide) -> str:
        for answer in await self._members.ask("rollout_problem", {"side": list(side)}):
            if answer and isinstance(answer, str):
                return answer
        return ""

    async def settle(self, state: RolloutState) -> str:
        return await asyncio.to_thread(settlement.settle, self._repositories, state)

    # -- people's ---------------------------------------------------------------------------------

    async def describe_model(self, name: str) -> RolloutModelDescription:
        """Describe the model ``name``.

        Raises:
            NotFound: there is no such model.
            Unavailable: it is not served, or no process answers.
        """
        answer = await self._one("rollout_describe_model", {"model": name})
        return checked_json.read(RolloutModelDescription, orjson.dumps(answer))

    async def describe_version(self, side: RolloutSide) -> VersionDescription:
        """Describe a version.

        Raises:
            NotFound, Unavailable: it is not served, or no process answers.
        """
        model, version = side
        answer = await self._one("rollout_describe_version", {"model": model, "version": version})
        return checked_json.read(VersionDescription, orjson.dumps(answer))

    async def hold(self, plan: RolloutPlan) -> None:
        """Load and keep both sides of ``plan`` in every process, or in none.

        Raises:
            ModelportError: a side cannot be served.
        """
        answers = await self._members.ask_patiently("rollout_hold", {"plan": plan.to_json()})
        for answer in answers:
            if isinstance(answer, ModelportError):
                await self.release(plan)
                raise answer

    async def release(self, plan: RolloutPlan) -> None:
        """Undo ``hold``, unless the rollout has begun."""
        routing = self._routings.get(plan.model)
        if routing is None or routing["plan"]["id"] != plan.id:
            await self._remove(plan, None)

    async def examples(self, model: str) -> list[Any]:
        """The kept requests with disagreeing answers, of all processes."""
        answers = await self._members.ask("rollout_examples", {"model": model})
        return [each for answer in answers if isinstance(answer, list) for each in answer]

    async def feedback(self, model: str, rows: list[Any]) -> dict[str, Any]:
        """Count labels that came later; return as ``Rollouts.feedback``.

        Raises:
            InvalidArgument: a row is malformed.
            NotFound: no rollout of the model runs.
        """
        answers = await self._feedback(model, rows, "")
        counted, repeated = set[int](), set[int]()
        left = list(range(len(rows)))
        for each in answers:
            others = {*each["unknown"], *each["repeated"]}
            counted |= set(left) - others
            repeated |= set(each["repeated"])
        left = [index for index in left if index not in counted | repeated]
        if left and answers:  # rows that say themselves what was predicted
            process = min(each["process"] for each in answers)
            for each in await self._feedback(model, [rows[index] for index in left], process):
                repeated |= {left[index] for index in each["repeated"]}
                left = [left[index] for index in each["unknown"]]
        repeated -= counted
        return {
            "counted": len(rows) - len(left) - len(repeated),
            "unknown": left,
            "repeated": sorted(repeated),
        }

    async def _feedback(self, model: str, rows: list[Any], process: str) -> list[dict[str, Any]]:
        arguments = {"model": model, "rows": rows, "process": process}
        answers = await self._members.ask_patiently("rollout_feedback", arguments)
        found: list[dict[str, Any]] = []
        for answer in answers:
            if isinstance(answer, ModelportError):
                raise answer
            if answer is not None:
                found.append(answer)
        return found

    async def _one(self, operation: str, arguments: Document) -> Any:
        """The first process's answer; raise its error."""
        for answer in await self._members.ask(operation, arguments):
            if isinstance(answer, ModelportError):
                raise answer
            return answer
        raise Unavailable("no process of this gateway responds")
