"""The workers as the serving processes of rollouts, which their parent controls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import structlog

from modelport.gateway.errors import ModelportError
from modelport.gateway.rollout.process_group import Answer, Document, Routings
from modelport.gateway.server.workers.channel import ChannelClosed
from modelport.gateway.server.workers.coordinator import ConnectedWorker, Coordinator

log = structlog.get_logger("modelport.workers")

#: A worker that does not confirm a routing in this time is replaced.
CONFIRM_SECONDS = 2.0


class WorkerMembers:
    """The workers that ``coordinator`` knows. It implements ``RolloutMembers``."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._tasks: set[asyncio.Task[Any]] = set()

    async def ask(self, operation: str, arguments: Document) -> Sequence[Answer]:
        """The answer or error of every worker, without those that do not respond in time."""
        answers = await self._coordinator.ask(operation, **arguments)
        return [answer for _, answer in answers if not isinstance(answer, TimeoutError)]

    async def ask_patiently(self, operation: str, arguments: Document) -> Sequence[Answer]:
        """Ask as ``ask`` does, and wait as long as a worker sends other messages."""
        answers = await self._coordinator.ask_patiently(operation, **arguments)
        return [answer for _, answer in answers if not isinstance(answer, ChannelClosed)]

    async def insist(self, operation: str, arguments: Document) -> None:
        """Ask as ``ask`` does, and replace the workers that do not confirm."""

        async def ask(worker: ConnectedWorker) -> None:
            try:
                async with asyncio.timeout(CONFIRM_SECONDS):
                    await worker.channel.request(operation, **arguments)
            except ChannelClosed:
                pass
            except (TimeoutError, ModelportError) as error:
                log.error(
                    "a worker does not apply the rollout and is killed",
                    worker=worker.number, reason=str(error),
                )  # fmt: skip
                worker.channel.close()
                # The supervisor kills the process in the step that sets this.
                await worker.channel.ended.wait()

        await asyncio.gather(*map(ask, self._coordinator.joined()))

    def notify(self, operation: str, arguments: Document) -> None:
        """Send to every worker, and wait for no answer."""

        async def tell(worker: ConnectedWorker) -> None:
            with contextlib.suppress(TimeoutError, ModelportError):
                async with asyncio.timeout(CONFIRM_SECONDS):
                    await worker.channel.request(operation, **arguments)

        for worker in self._coordinator.joined():
            task = asyncio.ensure_future(tell(worker))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def remember(self, routings: Routings) -> None:
        """Have workers that join later begin with these routings."""
        self._coordinator.route(list(routings.values()))
