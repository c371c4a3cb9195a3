"""Detection of workers that hang: their watchdogs send heartbeats on a socket."""

from __future__ import annotations

import contextlib
import socket
import time

from modelport.gateway.runtime.watchdog import LoopHeartbeat

#: A worker that changes its models and sends no message for this long hangs.
SILENT_SECONDS = 10.0
#: A worker is replaced if its watchdog is silent, or its event loop blocked, for longer than this.
HUNG_SECONDS = 7.0
#: The same while it computes or loads a model: libraries may hold the interpreter lock.
BUSY_SECONDS = 60.0


class HangDetector:
    """The last heartbeat of one worker, and its arrival."""

    def __init__(self) -> None:
        self._heartbeat = LoopHeartbeat(0.0, False)
        self._heartbeat_at = time.monotonic()

    def heard(self, heartbeats: socket.socket) -> None:
        """Read the heartbeats that have arrived; the last one counts."""
        with contextlib.suppress(BlockingIOError):
            while content := heartbeats.recv(64):
                self._heartbeat = LoopHeartbeat.unpacked(content)
                self._heartbeat_at = time.monotonic()

    def excuse(self) -> None:
        """Restart the clock: this process was suspended, or the worker has just joined."""
        self._heartbeat_at = time.monotonic()

    def hang_reason(self) -> str:
        """Return why the worker must be replaced, or an empty string."""
        limit = BUSY_SECONDS if self._heartbeat.computing else HUNG_SECONDS
        if time.monotonic() - self._heartbeat_at > limit:
            return "it is not running"
        return "its event loop is blocked" if self._heartbeat.blocked_seconds > limit else ""
