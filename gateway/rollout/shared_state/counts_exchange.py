"""The counts of a rollout in all gateways, by which its leader decides."""

from __future__ import annotations

import asyncio
from typing import Any

from modelport.gateway.rollout.processes import ProcessCounts, RolloutProcesses
from modelport.gateway.rollout.shared_state.replicated_rollout import ReplicatedRollout
from modelport.gateway.rollout.shared_state.state_store import RolloutStore, merged
from modelport.gateway.rollout.statistics.counts import StageCounts


async def requests_first() -> None:
    """Let the event loop serve the requests that have come in the meantime.

    A rollout's own work takes a millisecond or two several times a second. In one piece it would
    delay enough requests to raise their p99.
    """
    await asyncio.sleep(0)


class CountsExchange:
    """The counts of this gateway's processes, those of the others, and their sum.

    Each life of a gateway has a file of its own, so that its counts outlive it.
    """

    def __init__(self, processes: RolloutProcesses, store: RolloutStore, replica: str) -> None:
        self._processes = processes
        self._store = store
        self._replica = replica
        #: The last counts of every process, those that ended included.
        self._collected: dict[str, ProcessCounts] = {}
        #: The counts in this gateway's files, by rollout id.
        self._written: dict[str, dict[str, Any]] = {}

    async def collect(self) -> None:
        """Ask the processes."""
        self._collected |= await self._processes.collect()
        await requests_first()

    async def exchange(self, rollout: ReplicatedRollout) -> None:
        """Write this gateway's counts if they changed, and read the others'."""
        model, rollout_id = rollout.state.plan.model, rollout.state.plan.id
        own = self._own(rollout_id)
        await requests_first()
        document = {str(stage): each.to_json() for stage, each in own.items()}
        await requests_first()
        if document != self._written.get(rollout_id, {}):
            await self._store.write_counts(model, rollout_id, self._replica, document)
            self._written[rollout_id] = document
        others = await self._store.read_counts(model, rollout_id, self._replica)
        if rollout.state.plan.id == rollout_id:
            rollout.others = others

    def of(self, rollout: ReplicatedRollout) -> list[StageCounts]:
        """The sum over all gateways, of each stage of the plan."""
        plan = rollout.state.plan
        total = merged((rollout.others, self._own(plan.id)))
        return [total.get(stage, StageCounts()) for stage in range(len(plan.stages))]

    def forget(self, rollout_id: str) -> None:
        """Forget the counts of a rollout that has ended."""
        self._written.pop(rollout_id, None)
        left = {
            process: {key: each for key, each in counts.items() if key != rollout_id}
            for process, counts in self._collected.items()
        }
        self._collected = {process: counts for process, counts in left.items() if counts}

    def _own(self, rollout_id: str) -> dict[int, StageCounts]:
        found = self._collected.values()
        return merged(counts[rollout_id] for counts in found if rollout_id in counts)
