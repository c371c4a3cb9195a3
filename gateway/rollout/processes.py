"""The contract between the controller of rollouts and the processes that serve requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from modelport.gateway.rollout.plan import RolloutSide
from modelport.gateway.rollout.shared_state.state import RolloutRouting, RolloutState
from modelport.gateway.rollout.statistics.counts import StageCounts

#: The counts of one process since it began: by rollout id, and by index of the stage.
ProcessCounts = Mapping[str, Mapping[int, StageCounts]]


class RolloutProcesses(Protocol):
    """The processes of one gateway that serve requests."""

    async def collect(self) -> Mapping[str, ProcessCounts]:
        """The counts of every process, by an identifier that no later process has.

        A process that ended, or does not respond in time, may be left out.
        """

    def comparison_problem(self, rollout_id: str) -> str:
        """The reason why a process compares nothing, when it was last asked; empty: it does."""

    async def apply(self, routing: RolloutRouting) -> None:
        """Route requests as ``routing`` says; return when every process does.

        Both sides are held: they stay loaded, and the default version stays the baseline. A process
        that does not confirm in time is replaced; one that starts later begins with this routing.
        """

    async def remove(self, state: RolloutState) -> None:
        """End the rollout, which is settled: release both sides, and split nothing.

        The default version, or the label, is that of the configuration again. Unless the plan says
        to keep it, the candidate of a rollback may be unloaded. Also called if the state is gone.
        """

    def renew(self, model: str, until: float) -> None:
        """Tell the processes that the routing of ``model`` holds until a later monotonic time.

        Nothing waits for their confirmation. A process that does not hear of it in time sends
        everything to the baseline, because the gateway's controller is stuck or gone.
        """

    async def side_problem(self, side: RolloutSide) -> str:
        """The reason why ``side`` can no longer serve; empty while it serves or loads."""

    async def settle(self, state: RolloutState) -> str:
        """Make the outcome of ``state``, which has ended, that of the repository's configuration.

        Return when it is, or the reason why it cannot be. Another gateway may do the same at the
        same time, and it may be done already.

        Raises:
            Unavailable: it cannot be done now; it is tried again.
        """
