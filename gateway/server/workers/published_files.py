"""The files that the parent has accepted, passed to every worker: at its start, and as they change.

They go over the channel alone, because they have private keys and tokens.
"""

from __future__ import annotations

import asyncio

from modelport.gateway.errors import ModelportError
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.server.workers.channel import MessageChannel
from modelport.gateway.server.workers.coordinator import ANSWER_SECONDS


class PublishedFiles:
    """The files in use by the parent, and the channels of the workers that follow them."""

    def __init__(self, watcher: FileWatcher) -> None:
        self._watcher = watcher
        self._channels: set[MessageChannel] = set()
        watcher.publish = self._publish

    def begin(self, channel: MessageChannel) -> None:
        """Send the files to a worker that starts, as the first message, and all later changes."""
        channel.send(self._watcher.rows())
        self._channels.add(channel)

    def end(self, channel: MessageChannel) -> None:
        """Forget a worker whose channel has closed."""
        self._channels.discard(channel)

    async def _publish(self) -> None:
        """Have all workers use the files, and wait until they do, but not for one that hangs."""
        rows = self._watcher.rows()

        async def notify(channel: MessageChannel) -> None:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await channel.request("use_files", rows=rows)
            except (TimeoutError, ModelportError):
                pass  # it reads the message before it serves the next request, or it has ended

        await asyncio.gather(*map(notify, self._channels))
