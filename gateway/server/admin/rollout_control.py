"""The control of rollouts in a gateway: in its only process, or in the parent of its workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools

from modelport.gateway.protocols.cross_site_protection import Origins
from modelport.gateway.protocols.http_message import Answer, Handler, HttpRequest
from modelport.gateway.rollout.controller import RolloutController
from modelport.gateway.rollout.lease import STORE_SECONDS
from modelport.gateway.rollout.process_group import ProcessGroup, RolloutMembers
from modelport.gateway.rollout.rollout_service import RolloutService
from modelport.gateway.rollout.shared_state.state_files import RolloutFiles
from modelport.gateway.rollout.shared_state.state_store import RolloutStore
from modelport.gateway.rollout.webhooks import RolloutWebhooks
from modelport.gateway.settings import Settings

#: The paths of the API begin with this.
PATH = "/v2/rollouts"
#: The longest wait for the repository when the gateway stops; others take over by the lease then.
LEAVE_SECONDS = 1.0


class RolloutControl:
    """The controller and the API of rollouts over the serving processes ``members``.

    The state of rollouts is in the first model repository.
    """

    def __init__(self, settings: Settings, members: RolloutMembers) -> None:
        self._settings = settings
        group = ProcessGroup(members, settings.model_repositories)
        self._controller: RolloutController | None = None
        if settings.model_repositories and not settings.model_config_name:
            files = RolloutFiles(settings.model_repositories[0], STORE_SECONDS)
            webhooks = RolloutWebhooks(settings.rollout_webhook_secret)
            self._controller = RolloutController(RolloutStore(files), group, webhooks=webhooks)
        self.service = RolloutService(self._controller, group)
        self._running: asyncio.Task[None] | None = None

    def handler(self, rest: Handler) -> Handler:
        """The API of rollouts, before ``rest``."""
        settings = self._settings

        @functools.cache
        def api() -> Handler:
            from modelport.gateway.server.admin.rollout_api import RolloutApi  # imports FastAPI

            origins = Origins(settings.metrics_address, settings.allowed_hosts)
            return RolloutApi(self.service, origins)

        def both(request: HttpRequest) -> Answer:
            return (api() if request.path.startswith(PATH) else rest)(request)

        return both

    async def begin(self) -> None:
        """Hold the versions of rollouts that are running, before any model loads."""
        if self._controller is not None:
            await self._controller.begin()

    def run(self) -> None:
        """Follow and lead rollouts in the background."""
        if self._controller is not None:
            self._running = asyncio.get_running_loop().create_task(self._controller.run())

    async def stop(self) -> None:
        """Leave the rollouts to other gateways; the routing stays."""
        if self._controller is None or self._running is None:
            return
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._controller.stop()
